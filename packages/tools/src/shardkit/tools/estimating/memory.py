"""The memory of a simulated rank: every storage with its size, from the operator that made it until it is dropped.

Note [Whose memory]: a storage belongs to the category of the phase that allocated it, until more is known. Memory of
forward and backward counts as activations, unless a hook on its parameter finds it to be a gradient. Memory that the
optimizer allocates is the optimizer's. Core's events tell communication buffers and storages of unsharded parameters.
The sums are made after the iteration, when all of this is known.
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
    """Tracks every live storage, and calls `write` whenever one is allocated, resized or freed."""

    def __init__(self, write: Callable[[Held, int], None]) -> None:
        self._write = write
        # By id: one Python object stands for a storage as long as the storage lives.
        self._entries: dict[int, _Entry] = {}
        self._unsharded: dict[str, list[_Entry]] = {}

    @property
    def live(self) -> list[tuple[Held, int]]:
        return [(entry.held, entry.nbytes) for entry in self._entries.values()]

    def find(self, tensor: torch.Tensor) -> Held | None:
        entry = self._entries.get(id(tensor.untyped_storage()))
        return None if entry is None else entry.held

    def see(self, tensor: torch.Tensor, category: Category, block: int | None = None, host: bool = False) -> Held:
        """Notes a tensor that an operator returned; a known storage keeps its category."""
        storage = tensor.untyped_storage()
        key = id(storage)
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(
                weakref.ref(storage, lambda _: self._drop(key)), storage.nbytes(), Held(category, block, host)
            )
            self._entries[key] = entry
            self._write(entry.held, entry.nbytes)
        return entry.held

    def assign(self, tensor: torch.Tensor, category: Category, block: int | None = None, host: bool = False) -> None:
        """Sets the final category of a tensor's storage, its block, and whether it is on the host (see `Held`)."""
        held = self.see(tensor, category)
        held.category, held.block, held.host = category, block, host

    def assign_newest(self, nbytes: int, category: Category) -> None:
        """Assigns the storage that was seen last to `category`, if it has `nbytes`."""
        newest = next(reversed(self._entries.values()))
        if newest.nbytes == nbytes:
            newest.held.category = category

    def unsharded_changed(self, fqn: str, nbytes: int, block: int | None) -> None:
        """Notes that an unsharded parameter's storage of `nbytes` was allocated or freed without an operator."""
        known = []
        changed = False
        for entry in self._unsharded.get(fqn, []):
            storage = entry.storage()
            if storage is None:
                continue
            known.append(entry)
            if storage.nbytes() != entry.nbytes:
                changed, entry.nbytes = True, storage.nbytes()
                self._write(entry.held, entry.nbytes)
        if not changed:
            new = next(e for e in reversed(self._entries.values()) if e.nbytes == nbytes and e not in known)
            new.held.category, new.held.block = "unsharded_parameters", block
            known.append(new)
        self._unsharded[fqn] = known

    def _drop(self, key: int) -> None:
        self._write(self._entries.pop(key).held, 0)


@dataclass(frozen=True)
class Peak:
    """The moment of most memory: total bytes, bytes by category, and the position of the rank."""

    bytes: int
    by_category: dict[Category, int]
    fqn: str
    phase: str

    @property
    def place(self) -> str:
        if self.fqn:
            return f"in {self.phase} of '{self.fqn}'"
        return "outside of the model's modules" if self.phase == "between" else f"in {self.phase}"


@dataclass(frozen=True)
class Memory:
    """The memory of one iteration, on the device if there is one.

    Attributes:
        idle: bytes before it begins.
        peak: the moment of most memory.
        reserved: bytes that torch's caching allocator of GPUs would have reserved on the device.
        host: bytes in host memory by category, when they are most.
        levels: bytes by category over time; each entry has the number of trace steps before it.
    """

    idle: int
    peak: Peak
    reserved: int
    host: dict[Category, int]
    levels: list[tuple[int, tuple[int, ...]]]


def memory_of(trace: Trace, expandable: bool = False) -> Memory:
    """Adds up the storages of a trace; `expandable` is how the caching allocator makes segments.

    Freed memory is reused only on the stream that it belongs to: that of gathers for unsharded parameters, else that of
    the computation (Note [Who owns memory] of core).
    """
    sizes: dict[Held, int] = {}
    levels = dict.fromkeys(CATEGORIES, 0)
    host, most_host = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)
    gathers, computation = CachingAllocator(expandable), CachingAllocator(expandable)

    def change(held: Held, nbytes: int) -> int:
        """Resizes a storage; returns the number of bytes added on the device."""
        nonlocal most_host
        more = nbytes - sizes.get(held, 0)
        sizes[held] = nbytes
        if held.host:
            host[held.category] += more
            if more > 0 and sum(host.values()) > sum(most_host.values()):
                most_host = dict(host)
            return 0
        levels[held.category] += more
        (gathers if held.category == "unsharded_parameters" else computation).changed(id(held), nbytes)
        return more

    total = idle = sum(change(*one) for one in trace.held)
    peak = Peak(idle, dict(levels), "", "between")
    over_time = [(0, tuple(levels.values()))]
    stale = False
    for index, step in enumerate(trace.steps):
        if isinstance(step, Changed):
            more = change(step.about, step.nbytes)
            total += more
            stale = stale or bool(more)
            if total > peak.bytes:
                peak = Peak(total, dict(levels), step.fqn, step.phase)
        elif stale:
            over_time.append((index, tuple(levels.values())))
            stale = False
    return Memory(idle, peak, gathers.reserved + computation.reserved, most_host, over_time)


_MIB = 2**20
_ROUNDING = 512
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE = 10 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_LARGE_ROUNDING = 2 * _MIB


class _Pool:
    """The free blocks of one pool by size, then by address."""

    def __init__(self) -> None:
        self.end = 0
        self.free: list[tuple[int, int]] = []
        self.sizes: dict[int, int] = {}  # of the free blocks, by start address
        self.begins: dict[int, int] = {}  # by end address

    def put(self, address: int, size: int) -> None:
        """Frees a block and merges it with free neighbours."""
        if (before := self.begins.get(address)) is not None:
            size += self.take(before)
            address = before
        if address + size in self.sizes:
            size += self.take(address + size)
        bisect.insort(self.free, (size, address))
        self.sizes[address], self.begins[address + size] = size, address

    def take(self, address: int) -> int:
        """Takes the free block at an address; returns its size."""
        size = self.sizes.pop(address)
        del self.begins[address + size]
        del self.free[bisect.bisect_left(self.free, (size, address))]
        return size


class CachingAllocator:
    """Simulates torch's caching allocator for the allocations of a ledger.

    With `expandable` segments each pool has one segment, which grows at its end by pages of 2 or 20 MiB.

    Attributes:
        reserved: bytes of all segments; they are kept, so it never shrinks.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.reserved = 0
        self._expandable = expandable
        self._pools = {True: _Pool(), False: _Pool()}
        self._blocks: dict[int, tuple[_Pool, int, int]] = {}

    def changed(self, key: int, nbytes: int) -> None:
        """A storage has `nbytes` of memory now."""
        if key in self._blocks:
            pool, *block = self._blocks.pop(key)
            pool.put(*block)
        if nbytes:
            self._blocks[key] = self._take(-(-nbytes // _ROUNDING) * _ROUNDING)

    def _take(self, size: int) -> tuple[_Pool, int, int]:
        small = size <= _SMALL
        pool = self._pools[small]
        place = bisect.bisect_left(pool.free, (size, 0))
        # The end of an expandable segment is used last.
        if self._expandable and place + 1 < len(pool.free) and sum(pool.free[place]) == pool.end:
            place += 1
        address = pool.free[place][1] if place < len(pool.free) else self._grown(pool, size, small)
        found = pool.take(address)
        if found - size >= (_ROUNDING if small or self._expandable else _SMALL + 1):
            pool.put(address + size, found - size)
            found = size
        return pool, address, found

    def _grown(self, pool: _Pool, size: int, small: bool) -> int:
        """Makes a free block of at least `size`, as a segment or as pages after the last one; returns its address."""
        page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        if self._expandable:
            begin = pool.begins.get(pool.end, pool.end)
            nbytes = -(-(size - (pool.end - begin)) // page) * page
        else:
            pool.end += 1  # segments do not touch
            begin, nbytes = pool.end, page if size < _LARGE else -(-size // _LARGE_ROUNDING) * _LARGE_ROUNDING
        self.reserved += nbytes
        pool.end += nbytes
        pool.put(pool.end - nbytes, nbytes)
        return begin
