"""Faults that a rank does to itself at one exact instant: the n-th of the calls in which a save or a step can be hit.

An *instant* is a call into the system that a save makes (open, write, sync, rename, mkdir, unlink), a copy into staging
memory, or a phase of a training step. Counting them reaches every place, short ones too, that a clock would seldom hit.
"""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.core.checkpoint.saving import Image

SYSTEM_CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
ERRNOS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)

_SLOW_SECONDS = 0.5


@dataclass(frozen=True)
class Fault:
    """`kind` happens on `rank` at instant number `at`, or for "branch" in step number `at`, in the first attempt.

    Kinds: "kill" (SIGKILL of the rank), "kill all", "stop" (SIGSTOP), "slow", "call" (it fails with `number`), "disk"
    (so do all calls after it), "writer" (the thread that writes dies), "store" (the file through which the ranks found
    each other is deleted), and "branch" (the rank runs other modules than its peers).
    """

    kind: str
    rank: int
    at: int
    number: int = 0


class Injector:
    """Counts instants in this process, and strikes; leaves a file that says so."""

    def __init__(self, fault: Fault | None, rank: int, directory: Path, store: Path) -> None:
        self.fault = fault if fault is not None and fault.rank == rank else None
        self.directory, self.store = directory, store
        self.seen = 0
        self.struck = False

    def arm(self) -> None:
        """Wrap the functions whose calls are counted. They stay wrapped: the process is given up afterwards."""
        for name in SYSTEM_CALLS:
            setattr(os, name, self._wrapped(getattr(os, name), name))
        Image.fill = self._wrapped(Image.fill, "staging")

    def _wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.instant(name)
            return function(*args, **kwargs)

        return wrapper

    def instant(self, name: str) -> None:
        """One more; the fault's own strikes."""
        self.seen += 1
        fault = self.fault
        if fault is None or fault.kind == "branch" or self.seen < fault.at or (self.struck and fault.kind != "disk"):
            return
        if fault.kind in ("call", "disk") and name not in SYSTEM_CALLS:
            return
        if fault.kind == "writer" and threading.current_thread() is threading.main_thread():
            return
        self._note()
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "kill all":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "slow":
            time.sleep(_SLOW_SECONDS)
        elif fault.kind == "store":
            self.store.unlink()
        elif fault.kind == "writer":
            raise SystemExit("the thread that writes is ended")
        else:
            raise OSError(fault.number, os.strerror(fault.number))

    def branches(self, step: int) -> bool:
        """Whether this rank runs other modules in this step."""
        branches = self.fault is not None and (self.fault.kind, self.fault.at) == ("branch", step)
        if branches:
            self._note()
        return branches

    def _note(self) -> None:
        self.struck = True
        (self.directory / "struck").write_text("")  # `touch` makes a call that is counted
