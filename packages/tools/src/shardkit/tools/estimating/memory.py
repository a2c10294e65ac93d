"""The memory of a simulated rank: every storage with its size, from the operator that made it until it is dropped.

Note [Whose memory]: a storage belongs to the category of the phase that made it, until something better is known. What
was made in forward and backward is an activation unless it turns out to be a gradient, which a hook on its parameter
says; what the optimizer makes is the optimizer's; core's events tell which buffers are for communication and which
storages hold unsharded parameters. What is found out later is put right in the peak too: the gradient that makes a
peak is known to be one a moment after.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

Category: TypeAlias = Literal[
    "sharded_parameters",
    "unsharded_parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "inputs",
    "other",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(slots=True, eq=False)
class _Entry:
    storage: weakref.ReferenceType[torch.UntypedStorage]
    nbytes: int
    category: Category
    since: int


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


Observer: TypeAlias = Callable[[int, int], None]
"""Called with (identity of a storage, bytes it has now) whenever one is allocated, resized or freed."""


class Ledger:
    """Counts the bytes of live storages.

    Attributes:
        total: bytes that are live now.
        by_category: the same by category.
        peak: the most since `start`, None before.
    """

    def __init__(self, where: Callable[[], tuple[str, str]]) -> None:
        self.total = 0
        self.by_category: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.peak: Peak | None = None
        self._observers: list[Observer] = []
        self._where = where
        self._most = 0
        self._moment = self._peak_moment = 0
        self._entries: dict[int, _Entry] = {}
        self._unsharded: dict[str, list[_Entry]] = {}

    def start(self) -> None:
        """From now on the peak is looked for."""
        self._most = 0
        self._note_peak()

    def watch(self, observer: Observer) -> None:
        """Tells `observer` of every storage that is live, and from now on of every change."""
        self._observers.append(observer)
        for key, entry in self._entries.items():
            observer(key, entry.nbytes)

    def see(self, tensor: torch.Tensor, category: Category) -> None:
        """A tensor that an operator returned; a storage that is known already keeps its category."""
        storage = tensor.untyped_storage()
        key = id(storage)  # one Python object stands for a storage as long as that lives
        if key in self._entries:
            return
        self._moment += 1
        entry = _Entry(weakref.ref(storage, lambda _: self._drop(key)), storage.nbytes(), category, since=self._moment)
        self._entries[key] = entry
        self._change(key, category, entry.nbytes)

    def assign(self, tensor: torch.Tensor, category: Category) -> None:
        """What a tensor's storage turned out to be."""
        entry = self._entries.get(id(tensor.untyped_storage()))
        if entry is None:
            self.see(tensor, category)
        else:
            self._recategorise(entry, category)

    def assign_newest(self, nbytes: int, category: Category) -> None:
        """The storage that was seen last, if it has `nbytes`, is a buffer for `category`."""
        newest = next(reversed(self._entries.values()))
        if newest.nbytes == nbytes:
            self._recategorise(newest, category)

    def unsharded_changed(self, fqn: str, nbytes: int) -> None:
        """A storage of `nbytes` of an unsharded parameter was given memory, or lost it, behind the operators' back."""
        known = [entry for entry in self._unsharded.get(fqn, []) if entry.storage() is not None]
        changed = [entry for entry in known if self._measure(entry)]
        if not changed:
            new = next(e for e in reversed(self._entries.values()) if e.nbytes == nbytes and e not in known)
            self._recategorise(new, "unsharded_parameters")
            known.append(new)
        self._unsharded[fqn] = known

    def _measure(self, entry: _Entry) -> bool:
        storage = entry.storage()
        assert storage is not None
        change = storage.nbytes() - entry.nbytes
        entry.nbytes += change
        if change:
            self._moment += 1
            entry.since = self._moment
        self._change(id(storage), entry.category, change)
        return bool(change)

    def _recategorise(self, entry: _Entry, category: Category) -> None:
        self.by_category[entry.category] -= entry.nbytes
        self.by_category[category] += entry.nbytes
        if self.peak is not None and entry.since <= self._peak_moment:  # it is part of the peak
            self.peak.by_category[entry.category] -= entry.nbytes
            self.peak.by_category[category] += entry.nbytes
        entry.category = category

    def _drop(self, key: int) -> None:
        entry = self._entries.pop(key)
        self._change(key, entry.category, -entry.nbytes)

    def _change(self, key: int, category: Category, nbytes: int) -> None:
        self.total += nbytes
        self.by_category[category] += nbytes
        if self._observers and nbytes:
            entry = self._entries.get(key)
            for observer in self._observers:
                observer(key, 0 if entry is None else entry.nbytes)
        if self.total > self._most:
            self._note_peak()

    def _note_peak(self) -> None:
        self._most, self._peak_moment = self.total, self._moment
        fqn, phase = self._where()
        self.peak = Peak(self.total, dict(self.by_category), fqn, phase)


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
