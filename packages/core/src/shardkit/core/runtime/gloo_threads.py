"""Lets the threads of gloo finish before the interpreter ends.

After a collective, a thread of gloo first notifies the waiting program and then frees the tensors, for which it needs
Python's lock (GIL). CPython before 3.14 ends a thread that requests the lock while the interpreter is ending. C++ does
not allow this inside the function where it happens, and the process aborts after all its work is done: "terminate
called without an active exception", signal 6. `destroy_process_group` does not wait for the threads while a DeviceMesh
holds the group. Stock torch aborts in the same way. The time window is short, and longer on a busy machine.
"""

from __future__ import annotations

import time
from pathlib import Path

_THREAD = "pt_gloo_runloop"  # the name that ProcessGroupGloo gives its threads
_TASKS = Path("/proc/self/task")
_QUIET_LOOKS = 3
_PATIENCE_S = 5.0


def wait_for_threads() -> None:
    """For `atexit`: waits at most five seconds until no thread of gloo runs. Works only on Linux."""
    until = time.monotonic() + _PATIENCE_S
    quiet = 0 if _TASKS.is_dir() else _QUIET_LOOKS
    while quiet < _QUIET_LOOKS and time.monotonic() < until:
        quiet = 0 if _running() else quiet + 1
        time.sleep(0.001)  # releases Python's lock, so that a waiting thread gets it


def _running() -> bool:
    """Whether a thread of gloo is running or runnable; idle threads sleep."""
    for task in _TASKS.iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == _THREAD and rest.split()[0] != "S":
            return True
    return False
