"""Lets the threads of gloo finish before the interpreter ends.

A thread that has run a collective first tells the waiting program and then lets go of the tensors, for which it needs
Python's lock. CPython before 3.14 ends a thread that asks for the lock of an interpreter that is ending. That happens
within a function that C++ does not allow to be left so, and the process aborts after all its work is done: "terminate
called without an active exception", signal 6. `destroy_process_group` does not wait for the threads as long as a
DeviceMesh holds the group. Stock torch aborts in the same way; the moment is short, and a busy machine makes it longer.
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

__all__ = ["wait_at_exit"]

_THREAD = "pt_gloo_runloop"  # the name that ProcessGroupGloo gives its threads
_QUIET_LOOKS = 3
_PATIENCE_S = 5.0


@functools.cache
def wait_at_exit() -> None:
    """When the process ends, waits for at most five seconds until no thread of gloo runs. Only Linux tells which do."""
    if Path("/proc/self/task").is_dir():
        atexit.register(_wait)


def _wait() -> None:
    until = time.monotonic() + _PATIENCE_S
    quiet = 0
    while quiet < _QUIET_LOOKS and time.monotonic() < until:
        quiet = 0 if _running() else quiet + 1
        time.sleep(0.001)  # gives away Python's lock, so that a thread that waits for it gets it


def _running() -> bool:
    """Whether a thread of gloo runs, or would if it had a processor: one that waits for work sleeps."""
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == _THREAD and rest.split()[0] != "S":
            return True
    return False
