"""Memory over time from a log: by category, by module, and the composition of the peak."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from shardkit.core.events import ModuleBegan, StorageAllocated, StorageFreed, StorageKind
from shardkit.tools.profiling.log import Entry, GradientsKept, Held, Whereabouts
from shardkit.tools.report.schema import CATEGORIES, MemoryOfRank, Series

_OF_KIND: dict[StorageKind, str] = {
    "unsharded": "unsharded_parameters",
    "packed": "communication",
    "outbox": "communication",
    "reduce_input": "communication",
    "reduce_output": "communication",
    "gradient": "gradients",
}
# A chart cannot show more, and reports should stay small.
_MOST_POINTS = 3000


class Memory:
    """Follows a log. Levels never fall below zero, because allocations before the recording are not known.

    Attributes:
        module_peaks: peaks by module and category, in bytes.

    Args:
        entries: the whole log, for the names of its modules: memory of a prefetched module precedes its name.
        where: follows the same log, one entry ahead.
    """

    def __init__(self, entries: Iterable[Entry], where: Whereabouts) -> None:
        self._where = where
        self._now = 0.0
        self.module_peaks: dict[str, Counter[str]] = defaultdict(Counter)
        self._levels = dict.fromkeys(CATEGORIES, 0)
        self._of_module: dict[str, Counter[str]] = defaultdict(Counter)
        self._held: dict[tuple[str, int | str], tuple[int, str]] = {}
        self._series: dict[str, list[tuple[float, int]]] = {category: [] for category in CATEGORIES}
        self._module_series: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._resident: list[tuple[float, int]] = []
        self._owners: dict[str, str] = {}
        begun = [entry for entry in entries if isinstance(entry, ModuleBegan)]
        self._modules = list(dict.fromkeys(entry.fqn for entry in begun))
        self._root = next((entry.fqn for entry in begun if entry.root), "")
        self._peak = (0, 0.0, "", "", dict(self._levels))

    def follow(self, time: float, entry: Entry) -> None:
        self._now = time
        if isinstance(entry, Held) and entry.category == "resident":
            self._resident.append((time, entry.bytes))
        elif isinstance(entry, Held):
            self._hold(entry.category, entry.key, entry.bytes)
        elif isinstance(entry, StorageAllocated):
            owner = self.owner(entry.fqn)
            if entry.kind == "gradient":  # the reduction has taken them over
                self._release(lambda fqn: self.owner(fqn) == owner)
            self._change(_OF_KIND[entry.kind], owner, entry.bytes)
        elif isinstance(entry, StorageFreed):
            self._change(_OF_KIND[entry.kind], self.owner(entry.fqn), -entry.bytes)
            if entry.kind == "reduce_output":
                self._deliver(entry.bytes)
        elif isinstance(entry, GradientsKept):
            self._release(lambda fqn: fqn not in entry.fqns)

    def result(self) -> MemoryOfRank:
        peak, time, module, phase, levels = self._peak
        return MemoryOfRank(
            categories={category: _thinned(points) for category, points in self._series.items()},
            modules={module: _thinned(points) for module, points in self._module_series.items()},
            resident=_thinned(self._resident),
            peak=peak,
            peak_time=time,
            peak_module=module,
            peak_phase=phase,
            peak_categories=levels,
            resident_peak=max((size for _, size in self._resident), default=0),
        )

    def owner(self, fqn: str) -> str:
        """The module of a parameter or of a group's label: the longest module name that it begins with."""
        owner = self._owners.get(fqn)
        if owner is None:
            fits = [
                label
                for label in self._modules
                if any(fqn == name or fqn.startswith((f"{name}.", f"{name}:")) for name in (label, *label.split(", ")))
            ]
            owner = self._owners[fqn] = max(fits, key=len, default=self._root)
        return owner

    def _release(self, gone: Callable[[str], bool]) -> None:
        """Drops the unsharded gradients of some parameters: a reduction has taken them, or they are sharded now."""
        for fqn in [str(key) for category, key in self._held if category == "gradients"]:
            if gone(fqn):
                self._hold("gradients", fqn, 0)

    def _deliver(self, size: int) -> None:
        """Counts a reduction's result as new sharded gradients, or as added to existing ones, until backward ends."""
        counted, parameters = (
            self._held.get((category, ""), (0, ""))[0] for category in ("sharded_gradients", "sharded_parameters")
        )
        self._hold("sharded_gradients", "", counted + min(size, max(0, parameters - counted)))

    def _hold(self, category: str, key: int | str, size: int) -> None:
        module = (
            self.owner(str(key)) if category == "gradients" else self._where.module if category == "activations" else ""
        )
        before, module = self._held.get((category, key), (0, module))
        self._held[category, key] = (size, module)
        if not size:
            del self._held[category, key]
        self._change("gradients" if category == "sharded_gradients" else category, module, size - before)

    def _change(self, category: str, module: str, size: int) -> None:
        if not size:
            return
        level = self._levels[category] = max(0, self._levels[category] + size)
        self._series[category].append((self._now, level))
        if module:
            own = self._of_module[module]
            own[category] = max(0, own[category] + size)
            self.module_peaks[module] |= own  # the larger of each
            self._module_series[module].append((self._now, own.total()))
        total = sum(self._levels.values())
        if total > self._peak[0]:
            self._peak = (total, self._now, self._where.module, self._where.phase, dict(self._levels))


def _thinned(points: list[tuple[float, int]]) -> Series:
    """At most a few thousand points: from each interval the largest and the last."""
    if len(points) > _MOST_POINTS:
        begin, width = points[0][0], (points[-1][0] - points[0][0]) / (_MOST_POINTS / 2) or 1.0
        kept: dict[int, list[tuple[float, int]]] = {}
        for point in points:
            kept.setdefault(int((point[0] - begin) / width), []).append(point)
        points = [one for group in kept.values() for one in sorted({max(group, key=lambda one: one[1]), group[-1]})]
    return Series([time for time, _ in points], [size for _, size in points])
