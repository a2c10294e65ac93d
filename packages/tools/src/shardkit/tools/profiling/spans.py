"""Spans of modules and optimizers, and the steps that they make up."""

from __future__ import annotations

from collections import defaultdict

from shardkit.core.events import BackwardEnded, ModuleBegan, ModuleEnded, WaitFinished
from shardkit.tools.profiling.log import Entry, OptimizerBegan, OptimizerEnded
from shardkit.tools.profiling.whereabouts import Whereabouts
from shardkit.tools.report.schema import Span, Step

__all__ = ["Spans"]


class Spans:
    """Follows a log; `spans` in the order of their end."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
        self._borders: list[float] = []
        self._forwards = 0
        self._backward: tuple[float, int] | None = None
        self._parts: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._exposed: dict[int, float] = defaultdict(float)
        self._blocked: dict[int, float] = defaultdict(float)

    def follow(self, time: float, entry: Entry, where: Whereabouts, *, new_step: bool) -> None:
        """Takes the next entry in."""
        if new_step:
            self._borders.append(time)
        if isinstance(entry, ModuleBegan):
            self._open[entry.fqn, entry.phase].append((time, where.step))
            if entry.phase == "backward" and self._backward is None:
                self._backward = (time, where.step)
        elif isinstance(entry, ModuleEnded):
            outermost = entry.root and entry.phase == "forward"
            self._forwards += outermost
            self._close(entry.fqn, entry.phase, time, "forward" if outermost else "")
        elif isinstance(entry, BackwardEnded) and self._backward is not None:
            begin, step = self._backward
            self._parts["backward"][step] += time - begin
            self._backward = None
        elif isinstance(entry, OptimizerBegan):
            self._open["", "optimizer"].append((time, where.step))
        elif isinstance(entry, OptimizerEnded):
            self._close("", "optimizer", time, "optimizer")
        elif isinstance(entry, WaitFinished):
            seconds = entry.span.seconds() if entry.span is not None else entry.seconds
            self._exposed[where.step] += seconds
            self._blocked[where.step] += seconds if entry.span is not None else entry.blocked

    def steps(self, origin: float, begin: float, end: float, launches: list[tuple[int, float]]) -> list[Step]:
        """The steps between `begin` and `end`, with times since `origin`; none if no root has run forward."""
        launch: dict[int, float] = defaultdict(float)
        for step, seconds in launches:
            launch[step] += seconds
        if not self._forwards:
            return []
        borders = [begin, *self._borders, end]
        return [
            Step(
                index=index,
                begin=borders[index] - origin,
                end=borders[index + 1] - origin,
                forward=self._parts["forward"][index],
                backward=self._parts["backward"][index],
                optimizer=self._parts["optimizer"][index],
                exposed=self._exposed[index],
                blocked=self._blocked[index],
                launch=launch[index],
            )
            for index in range(len(borders) - 1)
        ]

    def _close(self, fqn: str, phase: str, time: float, part: str) -> None:
        opened = self._open[fqn, phase]
        if not opened:
            return
        begin, step = opened.pop()
        self.spans.append(Span(fqn, phase, step, begin, time))
        if part:
            self._parts[part][step] += time - begin
