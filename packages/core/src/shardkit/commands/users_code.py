"""Runs user code for a command: any error in it is reported in one line."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHOWN = 300
_OURS = tuple(f"/shardkit/{package}/" for package in ("core", "commands", "legacy_fsdp_compat", "tools", "tp_adapter"))
_NOT_THEIRS = ("/site-packages/", "/lib/python3", "<frozen ", *_OURS)


class UsersCodeError(ValueError):
    """User code cannot be imported, or raised; the message has the error, the place and what was expected."""


@contextlib.contextmanager
def users_code(what: str, hint: str, error: type[Exception] = UsersCodeError) -> Iterator[None]:
    """Turns any exception inside into an `error` of one line: the exception, the user's line, and a hint.

    An `error` is passed on unchanged, even if it was raised from another exception. Ctrl-C ends the program.
    """
    try:
        yield
    except (Exception, SystemExit) as raised:
        cause: BaseException | None = raised
        while cause is not None and not isinstance(cause, error):
            cause = cause.__cause__
        if cause is raised:
            raise
        if cause is not None:
            raise cause from raised
        said = " ".join(str(raised).split())
        message = f"{what} raised {type(raised).__name__}{_where(raised)}: {said:.{_SHOWN}}; {hint}"
        raise error(message) from raised


def _where(raised: BaseException) -> str:
    """The innermost line outside of installed packages, where the user can make changes."""
    frames = traceback.extract_tb(raised.__traceback__)
    theirs = [one for one in frames if not any(part in one.filename for part in _NOT_THEIRS)]
    return f" in line {theirs[-1].lineno} of {theirs[-1].filename}" if theirs else ""


def import_named(name: str, option: str, expected: str, error: type[Exception] = UsersCodeError) -> Any:
    """The object `module:name`; the working directory is on the path.

    Args:
        name: as the user wrote it.
        option: its name in messages, such as "--model pkg.module:build".
        expected: the expected kind of object, for messages, such as "a function that builds a model".
        error: the class of exceptions to raise.

    Raises:
        error: if the name has no module, the module cannot be imported, or it lacks the name.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise error(f"{option} is not MODULE:FUNCTION, such as training.model:build; give it in this form")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    hint = f"expected a module that can be imported from {Path.cwd()} or PYTHONPATH"
    with users_code(f"importing {option}", hint, error):
        found: Any = importlib.import_module(module)
    if not hasattr(found, attribute):
        raise error(f"{option}: the module {module} has no '{attribute}', expected {expected}")
    return getattr(found, attribute)
