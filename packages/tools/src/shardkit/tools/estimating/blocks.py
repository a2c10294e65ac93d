"""Blocks of memory that an allocator cuts from larger pieces, and joins again when they are free."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

__all__ = ["Block", "FreeBlocks", "joined"]


@dataclass(slots=True, eq=False)
class Block:
    """Part of a segment; `before` and `after` are its neighbours there."""

    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class FreeBlocks:
    """The free blocks of one pool, smallest first."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        bisect.insort(self._blocks, (block.size, id(block), block))

    def remove(self, block: Block) -> None:
        del self._blocks[bisect.bisect_left(self._blocks, (block.size, id(block), block))]

    def best_fit(self, size: int) -> Block | None:
        place = bisect.bisect_left(self._blocks, (size, 0))
        return self._blocks.pop(place)[2] if place < len(self._blocks) else None


def joined(block: Block, free: FreeBlocks) -> Block:
    """A block that is freed, in one with its free neighbours; the caller adds it to the free ones."""
    for neighbour in (block.before, block.after):
        if neighbour is not None and neighbour.free:
            free.remove(neighbour)
            first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
    block.free = True
    return block
