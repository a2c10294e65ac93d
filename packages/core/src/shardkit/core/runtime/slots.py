"""How a flat buffer is divided into one slot for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Slots:
    """Consecutive slots of a flat buffer, slot ``r`` being rank ``r``'s; ``tail`` elements behind them are unused.

    ::

        numels = (3, 3, 3, 1), tail = 2      | 0 0 0 | 1 1 1 | 2 2 2 | 3 | . . |
    """

    numels: tuple[int, ...]
    tail: int = 0

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes for one ``split_with_sizes`` call: the slots in rank order, then the tail if there is one."""
        return (*self.numels, self.tail) if self.tail else self.numels

    def start(self, rank: int) -> int:
        """First element of ``rank``'s slot."""
        return sum(self.numels[:rank])
