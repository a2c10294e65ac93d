"""Memory over time from a log: by category, by module, and what the peak was made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from shardkit.core.events import ModuleBegan, StorageAllocated, StorageFreed, StorageKind
from shardkit.tools.profiling.log import (
    ActivationDropped,
    ActivationSaved,
    Entry,
    GradientAccumulated,
    GradientsKept,
    HeldBytes,
    ResidentBytes,
    Whereabouts,
)
from shardkit.tools.report.schema import CATEGORIES, MemoryOfRank, Series

_OF_KIND: dict[StorageKind, str] = {
    "unsharded": "unsharded_parameters",
    "packed": "communication",
    "outbox": "communication",
    "reduce_input": "communication",
    "reduce_output": "communication",
    "residual": "communication",
    "gradient": "gradients",
}
_OF_COUNT = {"sharded_gradients": "gradients"}
# A chart cannot show more, and a report should stay small.
_MOST_POINTS = 3000


class Memory:
    """Follows a log. Levels never fall below zero: what was allocated before the recording is not known.

    Args:
        entries: the whole log, for the names of its modules: a prefetched one's memory comes before its name.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.module_peaks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._levels = dict.fromkeys(CATEGORIES, 0)
        self._counts: dict[str, int] = {}
        self._of_module: dict[tuple[str, str], int] = defaultdict(int)
        self._module_series: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._module_levels: dict[str, int] = defaultdict(int)
        self._saved: dict[int, tuple[int, str]] = {}
        self._series: dict[str, list[tuple[float, int]]] = {category: [] for category in CATEGORIES}
        self._resident: list[tuple[float, int]] = []
        self._owners: dict[str, str] = {}
        self._accumulated: dict[str, int] = {}
        begun = [entry for entry in entries if isinstance(entry, ModuleBegan)]
        self._modules = list(dict.fromkeys(entry.fqn for entry in begun))
        self._root = next((entry.fqn for entry in begun if entry.root), "")
        self._peak = 0
        self._peak_time = 0.0
        self._peak_where = ("", "")
        self._peak_levels = dict(self._levels)

    def follow(self, time: float, entry: Entry, where: Whereabouts) -> None:
        """Takes the next entry in."""
        if isinstance(entry, StorageAllocated):
            if entry.kind == "gradient":  # the reduction has taken them over
                owner = self.owner(entry.fqn)
                self._release(time, [fqn for fqn in self._accumulated if self.owner(fqn) == owner], where)
            self._change(time, _OF_KIND[entry.kind], self.owner(entry.fqn), entry.bytes, where)
        elif isinstance(entry, StorageFreed):
            self._change(time, _OF_KIND[entry.kind], self.owner(entry.fqn), -entry.bytes, where)
            if entry.kind == "reduce_output":
                self._deliver(time, entry.bytes, where)
        elif isinstance(entry, ActivationSaved):
            self._saved[entry.key] = (entry.bytes, where.module)
            self._change(time, "activations", where.module, entry.bytes, where)
        elif isinstance(entry, ActivationDropped):
            size, module = self._saved.pop(entry.key, (0, where.module))
            self._change(time, "activations", module, -size, where)
        elif isinstance(entry, GradientAccumulated):
            self._accumulate(time, entry, where)
        elif isinstance(entry, GradientsKept):
            self._release(time, [fqn for fqn in self._accumulated if fqn not in entry.fqns], where)
        elif isinstance(entry, HeldBytes):
            category = _OF_COUNT.get(entry.category, entry.category)
            self._change(time, category, "", entry.bytes - self._counts.get(entry.category, 0), where)
            self._counts[entry.category] = entry.bytes
        elif isinstance(entry, ResidentBytes):
            self._resident.append((time, entry.bytes))

    def result(self) -> MemoryOfRank:
        """What the log has said."""
        return MemoryOfRank(
            categories={category: _thinned(points) for category, points in self._series.items()},
            modules={module: _thinned(points) for module, points in self._module_series.items()},
            resident=_thinned(self._resident),
            peak=self._peak,
            peak_time=self._peak_time,
            peak_module=self._peak_where[0],
            peak_phase=self._peak_where[1],
            peak_categories=self._peak_levels,
            resident_peak=max((size for _, size in self._resident), default=0),
        )

    def _accumulate(self, time: float, entry: GradientAccumulated, where: Whereabouts) -> None:
        before = self._accumulated.get(entry.fqn, 0)
        self._accumulated[entry.fqn] = entry.bytes
        self._change(time, "gradients", self.owner(entry.fqn), entry.bytes - before, where)

    def _release(self, time: float, fqns: list[str], where: Whereabouts) -> None:
        """These unsharded gradients are a reduction's, or have become sharded ones."""
        for fqn in fqns:
            self._change(time, "gradients", self.owner(fqn), -self._accumulated.pop(fqn), where)

    def _deliver(self, time: float, size: int, where: Whereabouts) -> None:
        """A reduction's result has become sharded gradients, or was added to them: they are counted after backward."""
        counted = self._counts.get("sharded_gradients", 0)
        new = min(size, max(0, self._counts.get("sharded_parameters", 0) - counted))
        self._change(time, "gradients", "", new, where)
        self._counts["sharded_gradients"] = counted + new

    def _change(self, time: float, category: str, module: str, size: int, where: Whereabouts) -> None:
        if not size:
            return
        level = self._levels[category] = max(0, self._levels[category] + size)
        self._series[category].append((time, level))
        if module:
            self._change_module(time, category, module, size)
        total = sum(self._levels.values())
        if total > self._peak:
            self._peak, self._peak_time, self._peak_where = total, time, (where.module, where.phase)
            self._peak_levels = dict(self._levels)

    def _change_module(self, time: float, category: str, module: str, size: int) -> None:
        before = self._of_module[module, category]
        held = self._of_module[module, category] = max(0, before + size)
        self.module_peaks[module][category] = max(held, self.module_peaks[module][category])
        self._module_levels[module] += held - before
        self._module_series[module].append((time, self._module_levels[module]))

    def owner(self, fqn: str) -> str:
        """The module that a parameter, or a group's label, belongs to: the longest name that it begins with."""
        owner = self._owners.get(fqn)
        if owner is None:
            fits = [
                label
                for label in self._modules
                if any(fqn == name or fqn.startswith((f"{name}.", f"{name}:")) for name in (label, *label.split(", ")))
            ]
            owner = self._owners[fqn] = max(fits, key=len, default=self._root)
        return owner


def _thinned(points: list[tuple[float, int]]) -> Series:
    """At most a few thousand points: of those that fall into one interval the largest and the last."""
    if len(points) > _MOST_POINTS:
        begin, width = points[0][0], (points[-1][0] - points[0][0]) / (_MOST_POINTS / 2) or 1.0
        kept: dict[int, list[tuple[float, int]]] = {}
        for point in points:
            kept.setdefault(int((point[0] - begin) / width), []).append(point)
        points = [one for group in kept.values() for one in sorted({max(group, key=lambda one: one[1]), group[-1]})]
    return Series([time for time, _ in points], [size for _, size in points])
