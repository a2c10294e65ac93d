"""What a process takes from a GPU for its tensors: more than their bytes, followed allocation by allocation.

Torch's caching allocator keeps whole segments: requests are rounded to 512 bytes; those up to 1 MiB come from
segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments of their own size, rounded to
2 MiB. A freed block goes back to its segment and joins its free neighbours; the best fitting free block is used first.
(The numbers are those of torch's documentation of CUDA memory management.)
"""

from __future__ import annotations

from shardkit.tools.estimating.blocks import Block, FreeBlocks, joined

__all__ = ["CachingAllocator"]

_MIB = 2**20
_ROUNDING = 512
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE = 10 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_LARGE_ROUNDING = 2 * _MIB


class CachingAllocator:
    """Follows allocations as a ledger tells them.

    Attributes:
        reserved: bytes of all segments; they are kept, so it only grows.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._blocks: dict[int, Block] = {}
        self._free = {True: FreeBlocks(), False: FreeBlocks()}

    def changed(self, key: int, nbytes: int) -> None:
        """A storage has `nbytes` of memory now."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self._release(block)
        if nbytes:
            self._blocks[key] = self._take(-(-nbytes // _ROUNDING) * _ROUNDING)

    def _take(self, size: int) -> Block:
        small = size <= _SMALL
        block = self._free[small].best_fit(size)
        if block is None:
            segment = _SMALL_SEGMENT if small else _LARGE_SEGMENT
            if size >= _LARGE:
                segment = -(-size // _LARGE_ROUNDING) * _LARGE_ROUNDING
            self.reserved += segment
            block = Block(segment, small)
        block.free = False
        rest = block.size - size
        if rest >= (_ROUNDING if small else _SMALL + 1):
            other = Block(rest, small, True, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            self._free[small].add(other)
        return block

    def _release(self, block: Block) -> None:
        block = joined(block, self._free[block.small])
        self._free[block.small].add(block)
