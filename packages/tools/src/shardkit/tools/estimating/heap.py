"""What a process takes from the system for its tensors on a CPU, where torch asks glibc, followed block by block.

Large requests are mapped, each by itself, and go back to the system when they are freed. Smaller ones share a heap that
keeps its holes. What is large is either learnt, a freed large block raises the threshold to its size, up to 32 MiB, or
fixed by the environment (`MALLOC_MMAP_THRESHOLD_`) or by mallopt(3).

Note [Holes in the heap]: a learnt threshold ends above nearly all tensors, so most of them live in the heap, between
thousands of small blocks that no estimate knows: the objects of Python and of autograd. Each of them may keep a hole
open. So an estimate can only say how much memory a job takes where the threshold is fixed below its large tensors;
under a learnt one the simulated heap, which holds tensors only, is a lower bound.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from shardkit.tools.estimating.blocks import Block, FreeBlocks, joined
from shardkit.tools.machine import MachineError

__all__ = ["MAPPED_FROM", "VARIABLE", "Heap", "keeps_holes", "keeping_blocks", "threshold_of"]

MAPPED_FROM = 256 * 1024
"""The threshold that plans fix: below it, the blocks of a training job are few bytes."""

_PAGE = 4096
_FIRST_THRESHOLD = 128 * 1024
_LAST_THRESHOLD = 32 * 2**20
_TRIMMED_FROM = 128 * 1024
# Of each block: glibc's header, and what torch's alignment to 64 bytes costs.
_OVERHEAD = 80
# The variable of old, and the name of the same among GLIBC_TUNABLES.
VARIABLE, _TUNABLE = "MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold"
# Parameters of mallopt(3), and what glibc begins with.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MOST_MAPPED = 65536
_NEVER = -1


def threshold_of(environment: Mapping[str, str]) -> int | None:
    """The threshold that an environment fixes, in bytes; None where glibc learns it.

    glibc takes what is no number for 0, and maps everything then.
    """
    tunables = dict(one.split("=", 1) for one in environment.get("GLIBC_TUNABLES", "").split(":") if "=" in one)
    text = tunables.get(_TUNABLE, environment.get(VARIABLE))
    if text is None:
        return None
    try:
        return max(1, int(text, 0))
    except ValueError:
        return 1


def keeps_holes(threshold: int | None) -> bool:
    """Whether the simulated heap is only a lower bound; see Note [Holes in the heap]."""
    return threshold is None or threshold > 4 * MAPPED_FROM


@contextmanager
def keeping_blocks() -> Iterator[None]:
    """Within it no blocks of this process are mapped, and none given back: operators are timed in memory that is there.

    Afterwards what was kept goes back, and large blocks are mapped again; what is large glibc no longer learns.

    Raises:
        MachineError: where the C library is not glibc.
    """
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        raise MachineError(
            "operators cannot be timed apart from the mapping of blocks: the C library of this process has no mallopt, "
            "which glibc has; estimate with a description of the machine in a file"
        )
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        mallopt(_M_MMAP_MAX, _MOST_MAPPED)
        mallopt(_M_TRIM_THRESHOLD, _TRIMMED_FROM)
        library.malloc_trim(0)


class Heap:
    """Follows what glibc takes from the system for the storages that a ledger tells of.

    Args:
        threshold: from how many bytes on blocks are mapped; None where glibc learns it.
        mapped: called with the size of each block that is mapped.

    Attributes:
        peak: most bytes of heap and large blocks together, since `start`.
    """

    def __init__(self, threshold: int | None = None, mapped: Callable[[int], None] | None = None) -> None:
        self.peak = 0
        self._mapped = mapped
        self._size = self._large = 0
        self._learns = threshold is None
        self._threshold = threshold or _FIRST_THRESHOLD
        self._trimmed_from = _TRIMMED_FROM
        self._blocks: dict[int, Block | int] = {}
        self._free = FreeBlocks()
        self._top: Block | None = None

    def start(self) -> None:
        """From now on the peak is looked for."""
        self.peak = self._size + self._large

    def changed(self, key: int, nbytes: int) -> None:
        """A storage has `nbytes` of memory now."""
        block = self._blocks.pop(key, None)
        if isinstance(block, int):
            self._large -= block
            if self._learns and self._threshold < block <= _LAST_THRESHOLD:
                self._threshold, self._trimmed_from = block, 2 * block
        elif block is not None:
            self._release(block)
        if nbytes + _OVERHEAD >= self._threshold:
            self._blocks[key] = large = -(-(nbytes + _OVERHEAD) // _PAGE) * _PAGE
            self._large += large
            if self._mapped is not None:
                self._mapped(large)
        elif nbytes:
            self._blocks[key] = self._take(-(-(nbytes + _OVERHEAD) // 16) * 16)
        self.peak = max(self.peak, self._size + self._large)

    def _take(self, size: int) -> Block:
        block = self._free.best_fit(size)
        if block is None:
            block = self._grown(size)
        block.free = False
        rest = block.size - size
        if rest >= 32:
            other = Block(rest, False, True, block, block.after)
            if block.after is not None:
                block.after.before = other
            else:
                self._top = other
            block.after, block.size = other, size
            self._free.add(other)
        return block

    def _grown(self, size: int) -> Block:
        """A block at the end of the heap, which may have begun free."""
        top = self._top
        if top is not None and top.free:
            self._free.remove(top)
            self._size += size - top.size
            top.size = size
            return top
        self._size += size
        block = Block(size, False, before=top)
        if top is not None:
            top.after = block
        self._top = block
        return block

    def _release(self, block: Block) -> None:
        block = joined(block, self._free)
        if block.after is None:
            self._top = block
            if block.size > self._trimmed_from:  # given back to the system
                self._size -= block.size
                self._top = block.before
                if block.before is not None:
                    block.before.after = None
                return
        self._free.add(block)
