"""The log of a profiled rank: core's events and a few of our own, each with its time.

During training entries are only written; `replay.py` interprets them afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shardkit.core import events
from shardkit.core.events import BackwardEnded, Event, ModuleBegan, ModuleEnded, StorageAllocated, StorageFreed
from shardkit.tools.report.schema import CollectiveKind, Phase

STARTED: dict[type, CollectiveKind] = {
    events.GatherStarted: "all-gather",
    events.ReduceStarted: "reduce-scatter",
    events.AllReduceStarted: "all-reduce",
}
FINISHED: dict[type, CollectiveKind] = {
    events.GatherFinished: "all-gather",
    events.ReduceFinished: "reduce-scatter",
    events.AllReduceFinished: "all-reduce",
}
CARRIED: dict[str, tuple[CollectiveKind, ...]] = {
    "all-gather": ("all-gather",),
    "reduce-scatter": ("reduce-scatter", "all-reduce"),
}
"""The kinds of collectives in a lane of core, by the `operation` of its waits."""


@dataclass(frozen=True, slots=True)
class OptimizerBegan:
    """An optimizer's step begins."""


@dataclass(frozen=True, slots=True)
class OptimizerEnded:
    """An optimizer's step has ended."""


@dataclass(frozen=True, slots=True)
class Held:
    """From now on `key` holds this many bytes of a category.

    Categories and their keys: "activations" (a storage that autograd keeps) and "gradients" (a parameter with an
    unsharded gradient). With an empty key, for the whole rank: "sharded_parameters", "sharded_gradients", "optimizer",
    "other" (buffers), and "resident", as counted by the system or the device's allocator.
    """

    category: str
    key: int | str
    bytes: int


@dataclass(frozen=True, slots=True)
class GradientsKept:
    """After a backward: the parameters that still have an unsharded gradient, because no reduction has taken it."""

    fqns: tuple[str, ...]


Entry: TypeAlias = Event | OptimizerBegan | OptimizerEnded | Held | GradientsKept


def carried(entries: Iterable[Entry]) -> list[Entry]:
    """The entries that reproduce the memory at the end of `entries`; resident memory is read again."""
    storage: Counter[tuple[str, events.StorageKind]] = Counter()
    held: dict[tuple[str, int | str], Entry] = {}
    for entry in entries:
        if isinstance(entry, StorageAllocated):
            storage[entry.fqn, entry.kind] += entry.bytes
        elif isinstance(entry, StorageFreed):
            storage[entry.fqn, entry.kind] -= entry.bytes
        elif isinstance(entry, Held) and entry.bytes and entry.category != "resident":
            held[entry.category, entry.key] = entry
        elif isinstance(entry, Held):
            held.pop((entry.category, entry.key), None)
        elif isinstance(entry, GradientsKept):
            for gone in [key for key in held if key[0] == "gradients" and key[1] not in entry.fqns]:
                del held[gone]
    allocated = [StorageAllocated(fqn, count, kind) for (fqn, kind), count in storage.items() if count > 0]
    return [*allocated, *held.values()]


class Whereabouts:
    """Follows a log, entry by entry.

    Attributes:
        step: number of the step, from 0.
        phase: the current phase of the rank.

    Args:
        trains: whether the log holds optimizer steps, after which the next root forward starts a new step. If not,
            every root forward is a step.
    """

    def __init__(self, trains: bool) -> None:
        self.step = 0
        self.phase: Phase = "other"
        self._trains = trains
        self._border = False
        self._modules: list[tuple[str, str]] = []

    @property
    def module(self) -> str:
        """The innermost running module; the phase in brackets if there is none."""
        return self._modules[-1][0] if self._modules else f"({self.phase})"

    def follow(self, entry: Entry) -> bool:
        """Reads the next entry; True if a new step begins with it."""
        if isinstance(entry, ModuleBegan):
            return self._began(entry)
        if isinstance(entry, ModuleEnded):
            if (entry.fqn, entry.phase) in self._modules:  # the innermost of them
                del self._modules[-1 - self._modules[::-1].index((entry.fqn, entry.phase))]
            if not self._modules and self.phase == "forward":
                self.phase = "other"
        elif isinstance(entry, BackwardEnded):
            self._modules = [one for one in self._modules if one[1] == "forward"]
            self.phase = "forward" if self._modules else "other"
        elif isinstance(entry, OptimizerBegan):
            self.phase = "optimizer"
        elif isinstance(entry, OptimizerEnded):
            self.phase = "other"
            self._border = True
        return False

    def _began(self, entry: ModuleBegan) -> bool:
        outermost = entry.root and entry.phase == "forward"
        begins = self._border and outermost
        if outermost:
            self.step += begins
            self._border = not self._trains
        place = len(self._modules)
        if entry.phase == "backward":
            # Below the modules that contain it: if their outputs are the same, it begins backward after them.
            inside = (
                index
                for index, (fqn, phase) in enumerate(self._modules)
                if phase == "backward" and (entry.root or fqn.startswith(f"{entry.fqn}."))
            )
            place = next(inside, place)
            self.phase = "backward"
        elif self.phase != "backward":
            self.phase = "forward"
        self._modules.insert(place, (entry.fqn, entry.phase))
        return begins


def last_complete(entries: Iterable[Entry]) -> int | None:
    """The number of entries up to the end of the last optimizer step, including the counts right after it.

    None if there is no such step.
    """
    count = None
    counting = False
    for index, entry in enumerate(entries):
        counting = isinstance(entry, OptimizerEnded) or (
            counting and isinstance(entry, Held) and entry.category not in ("activations", "gradients")
        )
        if counting:
            count = index + 1
    return count
