"""Faults that a rank does to itself at one exact instant: the n-th of the calls in which a save or a step can be hit.

An *instant* is a call into the system that a save makes (open, write, sync, rename, mkdir, unlink), a copy into staging
memory, or a phase of a training step. Counting them reaches every place, short ones too, that a clock would seldom hit.
"""

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.image import Image

SYSTEM_CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
ERRNOS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
STEP_KINDS = ("forward", "backward", "hook", "optimizer", "nan", "branch", "exit")
"""What goes wrong in a training step."""


@dataclass(frozen=True)
class Fault:
    """`kind` happens on `rank` at instant number `at`, or for `STEP_KINDS` in step number `at`, in the first attempt.

    Kinds: "kill" (SIGKILL of the rank), "kill all", "stop" (SIGSTOP), "slow", "system" (the call fails with `number`),
    "store" (the file through which the ranks found each other is deleted), and `STEP_KINDS`.
    """

    kind: str
    rank: int
    at: int
    number: int = 0


class Injector:
    """Counts instants in this process, and strikes."""

    def __init__(self, fault: Fault | None, rank: int, store: str) -> None:
        self.fault = fault if fault is not None and fault.rank == rank else None
        self.store = store
        self.seen = 0
        self.struck = False

    def arm(self) -> None:
        """Wrap what is counted. There is no way back: the process is given up afterwards."""
        for name in SYSTEM_CALLS:
            setattr(os, name, self._wrapped(getattr(os, name), may_fail=True))
        Image.fill = self._wrapped(Image.fill, may_fail=False)

    def _wrapped(self, function: Callable[..., Any], may_fail: bool) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.instant(may_fail)
            return function(*args, **kwargs)

        return wrapper

    def instant(self, may_fail: bool = False) -> None:
        """One more; the fault's own strikes."""
        self.seen += 1
        fault = self.fault
        if fault is None or fault.kind in STEP_KINDS or self.struck or self.seen < fault.at:
            return
        if fault.kind == "system" and not may_fail:
            return
        self.struck = True
        strike(fault, self.store)

    def in_step(self, kind: str, step: int) -> bool:
        """Whether this step goes wrong in this way here."""
        return self.fault is not None and (self.fault.kind, self.fault.at) == (kind, step)


def strike(fault: Fault, store: str) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "kill all":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "slow":
        time.sleep(1.0)
    elif fault.kind == "store":
        Path(store).unlink()
    elif fault.kind == "system":
        raise OSError(fault.number, os.strerror(fault.number))


class Broken(RuntimeError):
    """What a rank raises when a fault says so."""


def spoil(loss: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients are NaN."""
    return loss * float("nan")
