"""How a rank of a test waits until another one has done something: the other one makes a file."""

import time
from pathlib import Path

_PATIENCE = 40.0  # less than the timeout of run_ranks: a failure then names the event


def await_file(path: Path, event: str) -> None:
    """Waits until a file exists.

    Raises:
        AssertionError: if it does not come; the message has the event that did not happen.
    """
    deadline = time.monotonic() + _PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"not within {_PATIENCE:g} s: {event}"
        time.sleep(0.002)
