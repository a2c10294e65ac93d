"""Code of the user that a conversion runs: whatever goes wrong in it ends in one line."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from shardkit.legacy_fsdp_compat.migrate.stored import CheckpointError

__all__ = ["users_code"]

_SHOWN = 300
_NOT_THEIRS = ("/site-packages/", "/lib/python3", f"{Path(__file__).parents[1]}/", "<frozen ")


@contextlib.contextmanager
def users_code(what: str, hint: str) -> Iterator[None]:
    """Whatever code of the user raises inside becomes a `CheckpointError` of one line."""
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        raise CheckpointError(
            f"{what} raised {type(error).__name__}{_where(error)}: {said:.{_SHOWN}}; {hint}"
        ) from error


def _where(error: BaseException) -> str:
    """The innermost line outside of installed packages, where the user can change something."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if not any(part in one.filename for part in _NOT_THEIRS)]
    return f" in line {theirs[-1].lineno} of {theirs[-1].filename}" if theirs else ""
