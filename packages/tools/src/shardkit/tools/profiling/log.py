"""What a rank writes down while it is profiled: core's events and a few of our own, each with its time.

Writing is all that happens during training; `replay.py` makes sense of the entries afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shardkit.core.events import (
    BackwardEnded,
    Event,
    ModuleBegan,
    ModuleEnded,
    StorageAllocated,
    StorageFreed,
    StorageKind,
)
from shardkit.tools.report.schema import Phase


@dataclass(frozen=True, slots=True)
class OptimizerBegan:
    """An optimizer's step begins."""


@dataclass(frozen=True, slots=True)
class OptimizerEnded:
    """An optimizer's step has ended."""


@dataclass(frozen=True, slots=True)
class ActivationSaved:
    """Autograd keeps a storage of so many bytes that it did not keep before, and that is no parameter's."""

    key: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ActivationDropped:
    """The memory of that storage is free again."""

    key: int


@dataclass(frozen=True, slots=True)
class GradientAccumulated:
    """Backward has put a gradient of so many bytes on the unsharded parameter `fqn`, or added to the one there."""

    fqn: str
    bytes: int


@dataclass(frozen=True, slots=True)
class GradientsKept:
    """After a backward: the parameters that still have an unsharded gradient, as no reduction has taken it."""

    fqns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """This rank's tensors of one category, counted: sharded parameters, sharded gradients, optimizer state, buffers."""

    category: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ResidentBytes:
    """What the process holds as the system, or the device's allocator, counts it."""

    bytes: int


Entry: TypeAlias = (
    Event
    | OptimizerBegan
    | OptimizerEnded
    | ActivationSaved
    | ActivationDropped
    | GradientAccumulated
    | GradientsKept
    | HeldBytes
    | ResidentBytes
)


def carried(entries: Iterable[Entry]) -> list[Entry]:
    """Entries that bring about the memory at the end of `entries`."""
    storage: Counter[tuple[str, StorageKind]] = Counter()
    saved: dict[int, ActivationSaved] = {}
    gradients: dict[str, GradientAccumulated] = {}
    held: dict[str, HeldBytes] = {}
    for entry in entries:
        if isinstance(entry, StorageAllocated):
            storage[entry.fqn, entry.kind] += entry.bytes
        elif isinstance(entry, StorageFreed):
            storage[entry.fqn, entry.kind] -= entry.bytes
        elif isinstance(entry, ActivationSaved):
            saved[entry.key] = entry
        elif isinstance(entry, ActivationDropped):
            saved.pop(entry.key, None)
        elif isinstance(entry, GradientAccumulated):
            gradients[entry.fqn] = entry
        elif isinstance(entry, GradientsKept):
            gradients = {fqn: gradients[fqn] for fqn in entry.fqns if fqn in gradients}
        elif isinstance(entry, HeldBytes):
            held[entry.category] = entry
    allocated = [StorageAllocated(fqn, count, kind) for (fqn, kind), count in storage.items() if count > 0]
    return [*held.values(), *allocated, *saved.values(), *gradients.values()]


class Whereabouts:
    """Follows a log, entry by entry.

    Attributes:
        step: number of the step, from 0.
        phase: what the rank does.

    Args:
        trains: whether the log holds optimizer steps, after which the next root forward is a new step. If not, every
            root forward is one.
    """

    def __init__(self, trains: bool) -> None:
        self.step = 0
        self.phase: Phase = "other"
        self._trains = trains
        self._border = False
        self._modules: list[tuple[str, str]] = []

    @property
    def module(self) -> str:
        """The innermost module that has begun and not ended; the phase in brackets where there is none."""
        return self._modules[-1][0] if self._modules else f"({self.phase})"

    def follow(self, entry: Entry) -> bool:
        """Takes the next entry in; True if a new step begins with it."""
        begins = False
        if isinstance(entry, ModuleBegan):
            begins = self._began(entry)
        elif isinstance(entry, ModuleEnded):
            self._ended(entry)
        elif isinstance(entry, BackwardEnded):
            self.phase = "forward" if any(phase == "forward" for _, phase in self._modules) else "other"
            self._modules = [one for one in self._modules if one[1] == "forward"]
        elif isinstance(entry, OptimizerBegan):
            self.phase = "optimizer"
        elif isinstance(entry, OptimizerEnded):
            self.phase = "other"
            self._border = True
        return begins

    def _began(self, entry: ModuleBegan) -> bool:
        outermost = entry.root and entry.phase == "forward"
        begins = self._border and outermost
        if outermost:
            self.step += begins
            self._border = not self._trains
        self._modules.insert(self._depth(entry), (entry.fqn, entry.phase))
        if entry.phase == "backward":
            self.phase = "backward"
        elif self.phase != "backward":
            self.phase = "forward"
        return begins

    def _depth(self, entry: ModuleBegan) -> int:
        """Where a module belongs among those that run: below the modules that it contains.

        A module whose output is that of its last part begins backward after that part.
        """
        if entry.phase == "backward":
            for index, (fqn, phase) in enumerate(self._modules):
                if phase == "backward" and (entry.root or fqn.startswith(f"{entry.fqn}.")):
                    return index
        return len(self._modules)

    def _ended(self, entry: ModuleEnded) -> None:
        for index in range(len(self._modules) - 1, -1, -1):
            if self._modules[index] == (entry.fqn, entry.phase):
                del self._modules[index]
                break
        if not self._modules and self.phase == "forward":
            self.phase = "other"


def last_complete(entries: Iterable[Entry]) -> int | None:
    """How many entries there are up to the end of the last optimizer step, with what was counted right after it.

    None if there is no such step.
    """
    count = None
    counting = False
    for index, entry in enumerate(entries):
        counting = isinstance(entry, OptimizerEnded) or (counting and isinstance(entry, HeldBytes | ResidentBytes))
        if counting:
            count = index + 1
    return count
