"""Errors of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def printable(text: str) -> str:
    """Text as one line for a terminal: control characters, except tabs, and lone surrogates are escaped."""
    return "".join(one if one == "\t" or one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used. The message names it, the value seen, and what to do.

    Control characters in names and values of a file are escaped: they could change what a terminal shows.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class DamagedCheckpointError(CheckpointError):
    """Files that differ from those written: truncated, changed, missing, or swapped. The message names the file.

    Remedy: restore an older checkpoint, as `fallback=True` and `--fallback` do, or copy the files again from where they
    are intact.
    """


_PASSING = (OSError, MemoryError)


@contextmanager
def damage_of(name: str, otherwise: str, passing: tuple[type[Exception], ...] = _PASSING) -> Iterator[None]:
    """Wraps code that parses bytes of `name`, as damaged bytes may raise anything. Raises DamagedCheckpointError with
    the name; `otherwise` describes the damage if the error has no text.

    Other CheckpointErrors and the exceptions in `passing` stay unchanged: a disk or memory failure does not mean that
    the bytes are damaged, and must not lead to a fallback. Code that damaged bytes can drive to any request, such as
    torch's, passes none.
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
