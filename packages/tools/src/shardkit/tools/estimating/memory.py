"""The memory of a simulated rank: every storage with its size, from the operator that made it until it is dropped.

Note [Whose memory]: a storage belongs to the category of the phase that made it, until something better is known. What
was made in forward and backward is an activation unless it turns out to be a gradient, which a hook on its parameter
says; what the optimizer makes is the optimizer's; core's events tell which buffers are for communication and which
storages hold unsharded parameters. Memory is added up when the iteration is over and all of that is known.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardkit.tools.estimating.trace import CATEGORIES, Category, Changed, Held, Trace


@dataclass(slots=True, eq=False)
class _Entry:
    storage: weakref.ReferenceType[torch.UntypedStorage]
    nbytes: int
    held: Held


class Ledger:
    """Knows every live storage, and tells `write` whenever one is allocated, resized or freed."""

    def __init__(self, write: Callable[[Held, int], None]) -> None:
        self._write = write
        self._entries: dict[int, _Entry] = {}
        self._unsharded: dict[str, list[_Entry]] = {}

    @property
    def live(self) -> list[tuple[Held, int]]:
        """Every storage with its bytes, those of unsharded parameters too while they have none."""
        return [(entry.held, entry.nbytes) for entry in self._entries.values()]

    def find(self, tensor: torch.Tensor) -> Held | None:
        """What is known of a tensor's storage."""
        entry = self._entries.get(id(tensor.untyped_storage()))
        return None if entry is None else entry.held

    def see(self, tensor: torch.Tensor, category: Category, block: int | None = None) -> Held:
        """A tensor that an operator returned; a storage that is known already keeps its category."""
        storage = tensor.untyped_storage()
        key = id(storage)  # one Python object stands for a storage as long as that lives
        entry = self._entries.get(key)
        if entry is None:
            held = Held(category, block)
            entry = _Entry(weakref.ref(storage, lambda _: self._drop(key)), storage.nbytes(), held)
            self._entries[key] = entry
            self._write(held, entry.nbytes)
        return entry.held

    def assign(self, tensor: torch.Tensor, category: Category, block: int | None = None) -> None:
        """What a tensor's storage turned out to be, and of which block (see `Held`)."""
        held = self.see(tensor, category)
        held.category, held.block = category, block

    def assign_newest(self, nbytes: int, category: Category) -> None:
        """The storage that was seen last, if it has `nbytes`, is a buffer for `category`."""
        newest = next(reversed(self._entries.values()))
        if newest.nbytes == nbytes:
            newest.held.category = category

    def unsharded_changed(self, fqn: str, nbytes: int, block: int | None) -> None:
        """A storage of `nbytes` of an unsharded parameter was given memory, or lost it, behind the operators' back."""
        known = [entry for entry in self._unsharded.get(fqn, []) if entry.storage() is not None]
        changed = [entry for entry in known if self._measure(entry)]
        if not changed:
            new = next(e for e in reversed(self._entries.values()) if e.nbytes == nbytes and e not in known)
            new.held.category, new.held.block = "unsharded_parameters", block
            known.append(new)
        self._unsharded[fqn] = known

    def _measure(self, entry: _Entry) -> bool:
        storage = entry.storage()
        assert storage is not None
        if storage.nbytes() == entry.nbytes:
            return False
        entry.nbytes = storage.nbytes()
        self._write(entry.held, entry.nbytes)
        return True

    def _drop(self, key: int) -> None:
        self._write(self._entries.pop(key).held, 0)


@dataclass(frozen=True)
class Peak:
    """The moment of most memory: bytes in all and by category, and where the rank was."""

    bytes: int
    by_category: dict[Category, int]
    fqn: str
    phase: str

    @property
    def place(self) -> str:
        """Where the rank was, in words."""
        if self.fqn:
            return f"in {self.phase} of '{self.fqn}'"
        return "outside of the model's modules" if self.phase == "between" else f"in {self.phase}"


@dataclass(frozen=True)
class Memory:
    """The memory of one iteration.

    Attributes:
        idle: bytes before it begins.
        peak: the moment of most memory.
        reserved: bytes that torch's caching allocator of GPUs would have taken from the device.
        levels: bytes by category, each time with the number of steps of the trace before.
    """

    idle: int
    peak: Peak
    reserved: int
    levels: list[tuple[int, tuple[int, ...]]]


def memory_of(trace: Trace, expandable: bool = False) -> Memory:
    """Adds up what a trace says of storages; `expandable` is how the caching allocator makes segments.

    Freed memory is used again only on the stream that it belongs to: that of gathers for unsharded parameters, else
    that of the computation (Note [Who owns memory] of core).
    """
    sizes: dict[Held, int] = {}
    levels = dict.fromkeys(CATEGORIES, 0)
    gathers, computation = CachingAllocator(expandable), CachingAllocator(expandable)
    over_time = []
    total = 0
    for held, nbytes in trace.held:
        sizes[held] = nbytes
        total += nbytes
        levels[held.category] += nbytes
        (gathers if held.category == "unsharded_parameters" else computation).changed(id(held), nbytes)
    idle, peak = total, Peak(total, dict(levels), "", "between")
    over_time.append((0, tuple(levels.values())))
    stale = False
    for index, step in enumerate(trace.steps):
        if not isinstance(step, Changed):
            if stale:
                over_time.append((index, tuple(levels.values())))
            stale = False
            continue
        held, change = step.held, step.nbytes - sizes.get(step.held, 0)
        sizes[held] = step.nbytes
        total += change
        levels[held.category] += change
        stale = stale or bool(change)
        (gathers if held.category == "unsharded_parameters" else computation).changed(id(held), step.nbytes)
        if total > peak.bytes:
            peak = Peak(total, dict(levels), step.fqn, step.phase)
    return Memory(idle, peak, gathers.reserved + computation.reserved, over_time)


@dataclass(slots=True, eq=False)
class Block:
    """Part of a segment, from `address` on; `before` and `after` are its neighbours there."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class FreeBlocks:
    """The free blocks of one pool, smallest first, of equal ones that with the lowest address."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        bisect.insort(self._blocks, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self._blocks[bisect.bisect_left(self._blocks, (block.size, block.address, block))]

    def best_fit(self, size: int, last: Block | None = None) -> Block | None:
        """Takes the smallest block of at least `size`; `last` only if there is no other."""
        place = bisect.bisect_left(self._blocks, (size, 0))
        if place + 1 < len(self._blocks) and self._blocks[place][2] is last:
            place += 1
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


_MIB = 2**20
_ROUNDING = 512
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE = 10 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_LARGE_ROUNDING = 2 * _MIB


class CachingAllocator:
    """Follows allocations as a ledger tells them.

    With `expandable` segments each pool has one, which grows at its end by pages of 2 or 20 MiB.

    Attributes:
        reserved: bytes of all segments; they are kept, so it only grows.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.reserved = 0
        self._expandable = expandable
        self._blocks: dict[int, Block] = {}
        self._free = {True: FreeBlocks(), False: FreeBlocks()}
        self._last: dict[bool, Block | None] = {True: None, False: None}

    def changed(self, key: int, nbytes: int) -> None:
        """A storage has `nbytes` of memory now."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self._release(block)
        if nbytes:
            self._blocks[key] = self._take(-(-nbytes // _ROUNDING) * _ROUNDING)

    def _take(self, size: int) -> Block:
        small = size <= _SMALL
        last = self._last[small]
        block = self._free[small].best_fit(size, last)
        if block is None:
            block = self._grown(size, small, last) if self._expandable else self._segment(size, small)
        block.free = False
        rest = block.size - size
        if rest >= (_ROUNDING if small or self._expandable else _SMALL + 1):
            other = Block(block.address + size, rest, small, True, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            self._freed(other)
        return block

    def _segment(self, size: int, small: bool) -> Block:
        nbytes = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        if size >= _LARGE:
            nbytes = -(-size // _LARGE_ROUNDING) * _LARGE_ROUNDING
        self.reserved += nbytes
        return Block(self.reserved - nbytes, nbytes, small)

    def _grown(self, size: int, small: bool, last: Block | None) -> Block:
        """The last block of a pool with more pages behind it, if it is free; else a block of new pages behind it."""
        page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        if last is not None and last.free:
            self._free[small].remove(last)
            block = last
        else:
            block = Block(0 if last is None else last.address + last.size, 0, small, before=last)
            if last is not None:
                last.after = block
        nbytes = -(-(size - block.size) // page) * page
        block.size += nbytes
        self.reserved += nbytes
        self._last[small] = block
        return block

    def _freed(self, block: Block) -> None:
        self._free[block.small].add(block)
        if self._expandable and block.after is None:
            self._last[block.small] = block

    def _release(self, block: Block) -> None:
        self._freed(joined(block, self._free[block.small]))
