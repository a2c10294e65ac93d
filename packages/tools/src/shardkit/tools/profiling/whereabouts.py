"""Where a rank is while its log is replayed: which step, which phase, which module."""

from __future__ import annotations

from collections.abc import Iterable

from shardkit.core.events import BackwardEnded, ModuleBegan, ModuleEnded
from shardkit.tools.profiling.log import Entry, HeldBytes, OptimizerBegan, OptimizerEnded, ResidentBytes
from shardkit.tools.report.schema import Phase

__all__ = ["Whereabouts", "last_complete"]


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
