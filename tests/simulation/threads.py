"""The thread that steps run on: jobs run when they are submitted, and count as work beside the host's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from shardkit.core.beyond import steps
from tests.simulation.races import Checker
from tests.simulation.timeline import Timeline


class Submitted:
    """A job that has run. `end` is called by whoever waits for it."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def exception(self) -> None:
        self._end()


class CheckedThread:
    """A thread whose accesses to pinned memory are not ordered with the host's, unless one waits for the other."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker

    def submit(self, run: Callable[..., None], *args: Any) -> Submitted:
        ended = self._checker.beside(lambda: run(*args))
        return Submitted(lambda: self._checker.host_joins(ended))


class TimedThread:
    """A thread that takes `cost` for each element of a step, one job after the other."""

    def __init__(self, timeline: Timeline, cost: float) -> None:
        self._timeline = timeline
        self._cost = cost
        self._free = 0.0

    def submit(self, run: Callable[..., None], *args: Any) -> Submitted:
        timeline, job = self._timeline, run.__self__  # type: ignore[attr-defined]
        host, timeline.host = timeline.host, max(timeline.host, self._free)
        run(*args)  # which may wait for the device
        end = self._free = timeline.host + self._cost * sum(twin.local.numel() for twin in job.twins)
        timeline.host = host

        def wait() -> None:
            timeline.host = max(timeline.host, end)

        return Submitted(wait)


@contextlib.contextmanager
def stepping_on(thread: CheckedThread | TimedThread) -> Iterator[None]:
    """Jobs go to `thread`."""
    with mock.patch.object(steps, "_worker", return_value=thread):
        yield
