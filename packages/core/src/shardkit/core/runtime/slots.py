"""How a flat buffer is divided into one slot for each rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slots:
    """Consecutive slots of a flat buffer, slot ``r`` being rank ``r``'s; ``tail`` elements behind them are unused.

    ``runs`` are pairs (ranks, elements of the slot of each), so that equal slots take no memory for each rank.

    ::

        runs = ((3, 3), (1, 1)), tail = 2      | 0 0 0 | 1 1 1 | 2 2 2 | 3 | . . |
    """

    runs: tuple[tuple[int, int], ...]
    tail: int = 0

    @property
    def numel(self) -> int:
        """Elements of all slots together, without the tail."""
        return sum(count * each for count, each in self.runs)

    def slot_numel(self, rank: int) -> int:
        """Elements of ``rank``'s slot."""
        for count, each in self.runs:
            if rank < count:
                return each
            rank -= count
        raise IndexError(f"no slot {rank} behind the last one")

    def start(self, rank: int) -> int:
        """First element of ``rank``'s slot."""
        start = 0
        for count, each in self.runs:
            start += min(rank, count) * each
            rank = max(0, rank - count)
        return start

    def sizes(self) -> tuple[int, ...]:
        """Sizes for one ``split_with_sizes`` call: the slots in rank order, then the tail if there is one.

        As long as the group is large: for transports that send to each rank by itself.
        """
        sizes: tuple[int, ...] = ()
        for count, each in self.runs:
            sizes += (each,) * count
        return (*sizes, self.tail) if self.tail else sizes
