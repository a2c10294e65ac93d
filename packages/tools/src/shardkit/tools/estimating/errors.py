"""What goes wrong before there is an estimate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console

from shardkit.tools.machine import MachineError
from shardkit.tools.report.files import ReportError


class EstimateError(Exception):
    """A model, an input or a setting that cannot be estimated; the message says what was seen and what to do."""


@contextlib.contextmanager
def explained(what: str, hint: str) -> Iterator[None]:
    """Turns what the user's functions raise into an `EstimateError` that says in which of them."""
    try:
        yield
    except EstimateError:
        raise
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause.__cause__, EstimateError | RuntimeError):
            cause = cause.__cause__
            if isinstance(cause, EstimateError):
                raise cause from error
        raise EstimateError(f"{what}: {type(error).__name__}: {error} ({hint})") from error


def status_of(command: Callable[[], int]) -> int:
    """The exit status of a command: 1 after an error that the user can mend, which is printed to stderr."""
    try:
        return command()
    except (EstimateError, MachineError, ReportError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False)
        return 1
