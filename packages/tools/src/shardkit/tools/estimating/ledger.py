"""The memory of a simulated rank: every storage with its size, from the operator that made it until it is dropped.

Note [Whose memory]: a storage belongs to the category of the phase that made it, until something better is known. What
was made in forward and backward is an activation unless it turns out to be a gradient, which a hook on its parameter
says; what the optimizer makes is the optimizer's; core's events tell which buffers are for communication and which
storages hold unsharded parameters. What is found out later is put right in the peak too: the gradient that makes a
peak is known to be one a moment after.
"""

from __future__ import annotations

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
