"""How a test waits for an event: a rank waits for another one's file, a test for the state of a process."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PATIENCE = 40.0  # less than the timeout of run_ranks: a failure then names the event


def await_file(path: Path, event: str) -> None:
    """Waits until a file exists, as `await_true` does."""
    await_true(path.exists, event)


def await_true(condition: Callable[[], Any], event: str = "what a test waits for") -> None:
    """Waits until a condition holds.

    Raises:
        AssertionError: if it does not come; the message has the event that did not happen.
    """
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {_PATIENCE:g} s: {event}"
        time.sleep(0.002)
