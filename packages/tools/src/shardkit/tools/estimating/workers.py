"""Parallel estimates: forked processes make them, one for each core."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

import torch

from shardkit.tools.estimating.result import Estimate
from shardkit.tools.estimating.trace import Trace

# Each worker has its own modules and caches, some hundred megabytes, and a search starts with few candidates.
_MOST = 8

_Task = TypeVar("_Task", bound=Hashable)
# In a forked process: the function that makes estimates. It is inherited, because jobs cannot be pickled.
_MAKE: list[Callable[[Any], Estimate]] = []


class Workers(Generic[_Task]):
    """Makes estimates without their traces, in this process and in others; a context manager.

    Tasks that another process fails to run or send back are run here, so errors come from this process. `make` makes
    the estimate of a task.
    """

    def __init__(self, make: Callable[[_Task], Estimate]) -> None:
        self._make = make
        self._begun: dict[_Task, Future[Estimate]] = {}
        self._pool: ProcessPoolExecutor | None = None
        count = min(_MOST, len(os.sched_getaffinity(0)))
        if count > 1:
            # Forked at the first task, before this process runs a backward: autograd's threads do not survive a fork.
            self._pool = ProcessPoolExecutor(count, get_context("fork"), _begin, (make,))

    def __enter__(self) -> Workers[_Task]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def begin(self, tasks: Iterable[_Task]) -> None:
        """Starts estimates that may be requested later."""
        for task in tasks:
            if self._pool is not None and task not in self._begun:
                self._begun[task] = self._pool.submit(_made, task)

    def estimate(self, task: _Task) -> Estimate:
        """The estimate of a task; raises the errors of `make`."""
        if self._pool is not None:
            try:
                self.begin([task])
                return self._begun[task].result()
            except Exception:  # noqa: BLE001 - told below, if it is not the process that failed
                pass
        return _without_trace(self._make(task))


def _begin(make: Callable[[Any], Estimate]) -> None:
    _MAKE.append(make)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    torch.set_num_threads(1)


def _made(task: Any) -> Estimate:
    return _without_trace(_MAKE[-1](task))


def _without_trace(found: Estimate) -> Estimate:
    return replace(found, recording=replace(found.recording, trace=Trace()))
