"""What can be wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def printable(text: str) -> str:
    """Text with its control characters and lone surrogates escaped, but for tabs: one line for a terminal."""
    return "".join(one if one == "\t" or one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used: the message says which, what was seen, and what to do.

    Control characters, which names and values in a file may have, are escaped: they could change what a terminal shows.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class DamagedCheckpointError(CheckpointError):
    """Files that are not what was written: truncated, changed, missing, or swapped. The message names the file."""


_PASSING = (OSError, MemoryError)


@contextmanager
def damage_of(name: str, otherwise: str, passing: tuple[type[Exception], ...] = _PASSING) -> Iterator[None]:
    """Around what takes bytes of `name` apart, as damaged ones fail in any way. What is raised is a
    DamagedCheckpointError with the name; `otherwise` says what is wrong if the error does not say it.

    A CheckpointError that is none stays as it is, and so does what is `passing`: a disk or a memory that fails says
    nothing about the bytes, and nobody should go back to older ones for it. Code that damaged bytes lead to ask for
    anything, such as torch's, passes none of them.
    """
    try:
        yield
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{name}: {error}") from error
    except CheckpointError:
        raise
    except Exception as error:
        if isinstance(error, passing):
            raise
        raise DamagedCheckpointError(f"{name} {otherwise}: {error!r}") from error
