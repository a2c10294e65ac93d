"""What a process holds for its tensors: more than their bytes. Two allocators, followed allocation by allocation.

On a GPU torch's caching allocator keeps whole segments: requests are rounded to 512 bytes; those up to 1 MiB come from
segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments of their own size, rounded to
2 MiB. A freed block goes back to its segment and joins its free neighbours; the best fitting free block is used first.
(The numbers are those of torch's documentation of CUDA memory management.)

On a CPU torch asks glibc: large requests get pages of their own and give them back, smaller ones share a heap that
keeps its holes. What is large is learnt: a freed large block raises the limit to its size, up to 32 MiB (mallopt(3)).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

__all__ = ["CachingAllocator", "Heap"]

_MIB = 2**20
_ROUNDING = 512
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE = 10 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_LARGE_ROUNDING = 2 * _MIB


@dataclass(slots=True, eq=False)
class _Block:
    """Part of a segment; `before` and `after` are its neighbours there."""

    size: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class _FreeBlocks:
    """The free blocks of one pool, smallest first."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int, _Block]] = []

    def add(self, block: _Block) -> None:
        bisect.insort(self._blocks, (block.size, id(block), block))

    def remove(self, block: _Block) -> None:
        del self._blocks[bisect.bisect_left(self._blocks, (block.size, id(block), block))]

    def best_fit(self, size: int) -> _Block | None:
        place = bisect.bisect_left(self._blocks, (size, 0))
        return self._blocks.pop(place)[2] if place < len(self._blocks) else None


class CachingAllocator:
    """Follows allocations as a ledger tells them.

    Attributes:
        reserved: bytes of all segments; they are kept, so it only grows.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._blocks: dict[int, _Block] = {}
        self._free = {True: _FreeBlocks(), False: _FreeBlocks()}

    def changed(self, key: int, nbytes: int) -> None:
        """A storage has `nbytes` of memory now."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self._release(block)
        if nbytes:
            self._blocks[key] = self._take(-(-nbytes // _ROUNDING) * _ROUNDING)

    def _take(self, size: int) -> _Block:
        small = size <= _SMALL
        block = self._free[small].best_fit(size)
        if block is None:
            segment = _SMALL_SEGMENT if small else _LARGE_SEGMENT
            if size >= _LARGE:
                segment = -(-size // _LARGE_ROUNDING) * _LARGE_ROUNDING
            self.reserved += segment
            block = _Block(segment, small)
        block.free = False
        rest = block.size - size
        if rest >= (_ROUNDING if small else _SMALL + 1):
            other = _Block(rest, small, True, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            self._free[small].add(other)
        return block

    def _release(self, block: _Block) -> None:
        block = _joined(block, self._free[block.small])
        self._free[block.small].add(block)


def _joined(block: _Block, free: _FreeBlocks) -> _Block:
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


_PAGE = 4096
_FIRST_THRESHOLD = 128 * 1024
_LAST_THRESHOLD = 32 * _MIB
# Of each block: glibc's header, and what torch's alignment to 64 bytes costs.
_OVERHEAD = 80


class Heap:
    """Follows what glibc takes from the system for the storages that a ledger tells of.

    Attributes:
        peak: most bytes of heap and large blocks together, since `start`.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._size = self._large = 0
        self._threshold = _FIRST_THRESHOLD
        self._blocks: dict[int, _Block | int] = {}
        self._free = _FreeBlocks()
        self._top: _Block | None = None

    def start(self) -> None:
        """From now on the peak is looked for."""
        self.peak = self._size + self._large

    def changed(self, key: int, nbytes: int) -> None:
        """A storage has `nbytes` of memory now."""
        block = self._blocks.pop(key, None)
        if isinstance(block, int):
            self._large -= block
            if block <= _LAST_THRESHOLD:
                self._threshold = max(self._threshold, block)
        elif block is not None:
            self._release(block)
        if nbytes >= self._threshold:
            self._blocks[key] = large = -(-(nbytes + _OVERHEAD) // _PAGE) * _PAGE
            self._large += large
        elif nbytes:
            self._blocks[key] = self._take(-(-(nbytes + _OVERHEAD) // 16) * 16)
        self.peak = max(self.peak, self._size + self._large)

    def _take(self, size: int) -> _Block:
        block = self._free.best_fit(size)
        if block is None:
            block = self._grown(size)
        block.free = False
        rest = block.size - size
        if rest >= 32:
            other = _Block(rest, False, True, block, block.after)
            if block.after is not None:
                block.after.before = other
            else:
                self._top = other
            block.after, block.size = other, size
            self._free.add(other)
        return block

    def _grown(self, size: int) -> _Block:
        """A block at the end of the heap, which may have begun free."""
        top = self._top
        if top is not None and top.free:
            self._free.remove(top)
            self._size += size - top.size
            top.size = size
            return top
        self._size += size
        block = _Block(size, False, before=top)
        if top is not None:
            top.after = block
        self._top = block
        return block

    def _release(self, block: _Block) -> None:
        block = _joined(block, self._free)
        if block.after is None:
            self._top = block
            if block.size > 2 * self._threshold:  # given back to the system
                self._size -= block.size
                self._top = block.before
                if block.before is not None:
                    block.before.after = None
                return
        self._free.add(block)
