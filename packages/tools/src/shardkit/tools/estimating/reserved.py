"""What a process holds for its tensors: more than their bytes.

On a GPU torch's caching allocator keeps whole segments, which is simulated here: requests are rounded to 512 bytes;
those up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments of
their own size, rounded to 2 MiB. A freed block goes back to its segment and joins its free neighbours; the best fitting
free block is used first. (The numbers are those of torch's documentation of CUDA memory management.)

On a CPU pages are what counts; see `resident_bytes`.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

__all__ = ["CachingAllocator", "resident_bytes"]

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
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._free[block.small].remove(neighbour)
                first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        block.free = True
        self._free[block.small].add(block)


def resident_bytes(tensor_bytes: int, mapped_bytes: int, process_bytes: int) -> int:
    """Resident memory of a CPU rank: its tensors, what it maps of its peers' memory, and the process itself."""
    return tensor_bytes + mapped_bytes + process_bytes
