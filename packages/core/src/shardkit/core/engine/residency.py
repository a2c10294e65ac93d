"""Which parameter groups to hold unsharded within a budget of bytes: arithmetic only, knows no tensors.

Note [Held in order of use]
Groups that are used next are worth holding, so the budget is filled in order of next use, beginning with the groups in
use, up to the first group that does not fit. In forward the order is the rest of forward, then backward; a group that
is early in forward is late in backward, so it is the first to be freed and the last to be gathered again. For a chain
of equal groups this is the smallest number of gathers that the budget allows. A larger budget holds everything that a
smaller one holds, so the number of gathers never rises with the budget; skipping a large group in favour of a small
later one would undo this.

A group takes more memory during its gather (its packed buffer) than afterwards. Its later size decides whether it is
worth holding; the size during the gather decides whether the gather can start now.

Note [Decisions at every module]
`worth_holding`, `make_room` and `gather_ahead` give the exact decisions, and read all groups that the budget holds. The
beginning or end of a module usually changes little: the next group is already gathered, and one more is free.
`gather_next` and `is_worth_holding` decide this from sums in `Ledger` and `Uses`, in constant time, with the same
results. `LastFirst` does the same for groups to free: it keeps them sorted, and checks only those that have changed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

__all__ = [
    "Ahead",
    "LastFirst",
    "Ledger",
    "Order",
    "Uses",
    "gather_ahead",
    "gather_next",
    "is_worth_holding",
    "make_room",
    "worth_holding",
]

K = TypeVar("K", bound=Hashable)

Order: TypeAlias = Callable[[], Iterable[K]]
"""Begins the groups that are going to be used, soonest first; read no further than it takes. One may come twice."""


@dataclass(frozen=True)
class Ahead(Generic[K]):
    """The idle groups to free, then the groups to gather, in order."""

    free: tuple[K, ...]
    gather: tuple[K, ...]


def worth_holding(budget: int, in_use: int, upcoming: Order[K], held: Callable[[K], int]) -> list[K]:
    """The groups that `budget` bytes hold beside the `in_use` bytes, soonest first; see Note [Held in order of use].

    `held` returns a group's bytes; it is called only for the groups that fit and the one after them.
    """
    hold: dict[K, None] = {}
    taken = in_use
    for key in upcoming():
        if key in hold:
            continue
        taken += held(key)
        if taken > budget:
            break
        hold[key] = None
    return list(hold)


def make_room(budget: int, in_use: int, idle: Mapping[K, int], upcoming: Order[K]) -> tuple[K, ...]:
    """The idle groups to free so that `in_use` bytes and the remaining `idle` bytes take at most `budget`.

    Groups without a known use go first, then the one used last. All are freed if that is still too little.
    """
    free: list[K] = []
    excess = in_use + sum(idle.values()) - budget
    for key in _last_first(idle, upcoming) if excess > 0 else ():
        if excess <= 0:
            break
        free.append(key)
        excess -= idle[key]
    return tuple(free)


def gather_ahead(
    budget: int,
    in_use: int,
    idle: Mapping[K, int],
    upcoming: Order[K],
    held: Callable[[K], int],
    gathering: Callable[[K], int],
    wanted: Callable[[K], bool],
) -> Ahead[K]:
    """The groups to gather ahead beside `in_use` bytes: those worth holding whose gathers can start now.

    `held` returns a group's bytes, `gathering` its bytes during the gather, and `wanted` whether it may be gathered
    now. Only groups that are not worth holding are freed, and only as many as needed.
    """
    hold = worth_holding(budget, in_use, upcoming, held)
    room = budget - in_use - sum(idle.values())
    spare: list[K] | None = None  # sorted only if groups must be freed
    free: list[K] = []
    gather: list[K] = []
    for key in hold:
        if key in idle or not wanted(key):
            continue
        needs = gathering(key)
        if needs > room:
            if spare is None:
                kept = set(hold)
                loose = {one: nbytes for one, nbytes in idle.items() if one not in kept}
                spare = _last_first(loose, upcoming) if loose else []
            if needs > room + sum(idle[one] for one in spare):
                break
            while needs > room:
                free.append(spare.pop(0))
                room += idle[free[-1]]
        gather.append(key)
        room -= needs
    return Ahead(tuple(free), tuple(gather))


def _last_first(idle: Mapping[K, int], upcoming: Order[K]) -> list[K]:
    next_use: dict[K, int] = {}
    for position, key in enumerate(upcoming()):
        next_use.setdefault(key, position)
    return sorted(idle, key=lambda key: next_use.get(key, math.inf), reverse=True)


class Ledger(Generic[K]):
    """The groups that have unsharded memory, within a budget of bytes.

    Attributes:
        held: the bytes of each, oldest first.
        total: their sum.
        lost: groups whose memory was freed since `gather_next` last looked.
        gained: groups that got memory since it was last cleared, and still have it.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held: dict[K, int] = {}
        self.total = 0
        self.lost: set[K] = set()
        self.gained: dict[K, None] = {}

    @property
    def room(self) -> int:
        """Bytes that these groups leave of the budget."""
        return self.budget - self.total

    def put(self, key: K, nbytes: int) -> None:
        """Notes that `key` now has `nbytes`."""
        if key not in self.held:
            self.gained[key] = None
        self.total += nbytes - self.held.get(key, 0)
        self.held[key] = nbytes

    def drop(self, key: K) -> None:
        """Notes that `key` has no memory any more."""
        nbytes = self.held.pop(key, None)
        if nbytes is not None:
            self.total -= nbytes
            self.lost.add(key)
            self.gained.pop(key, None)


class LastFirst(Generic[K]):
    """Groups that may be freed, the one used last first.

    Args:
        idle: the idle groups that have memory now.
        place: sort key: the smaller, the later a group is used next. `add` a group again when its key becomes smaller;
            a larger key is detected here.
    """

    def __init__(self, idle: Iterable[K], place: Callable[[K], tuple[int, ...]]) -> None:
        self._place = place
        self._count = itertools.count()  # of two groups with the same key the older goes first
        self._heap = [(place(key), next(self._count), key) for key in idle]
        heapq.heapify(self._heap)

    def add(self, key: K) -> None:
        """Call if `key` is new, or its place may have become smaller."""
        heapq.heappush(self._heap, (self._place(key), next(self._count), key))

    def take(self, is_idle: Callable[[K], bool]) -> K | None:
        """The group to free; None if there is none. Drops groups that are not idle: `add` them when they are."""
        while self._heap:
            place, count, key = self._heap[0]
            if not is_idle(key):
                heapq.heappop(self._heap)
            elif (now := self._place(key)) != place:
                heapq.heapreplace(self._heap, (now, count, key))
            else:
                heapq.heappop(self._heap)
                return key
        return None


class Uses(Generic[K]):
    """The order in which a phase uses its groups, and the bytes between any two uses.

    Args:
        steps: the groups of each module, in the order in which modules begin.
        held: bytes of a group.

    Attributes:
        distinct: whether no group is used twice; the sums below require this.
        reached: all uses from the current step to before this one have memory or are in use.
        kept: groups that were worth holding beyond this phase when their use in it ended. They still are, because the
            groups before them in the order take the same memory, unless the phase deviates from the expected order.
    """

    def __init__(self, steps: Iterable[Sequence[K]], held: Callable[[K], int]) -> None:
        keys_of = [tuple(step) for step in steps]
        self.keys = [key for step in keys_of for key in step]
        self.firsts = [0, *itertools.accumulate(map(len, keys_of))]  # of each step
        self.ends = [0, *itertools.accumulate(map(held, self.keys))]
        self.places = {key: place for place, key in enumerate(self.keys)}
        self.distinct = len(self.places) == len(self.keys)
        self.reached = 0
        self.kept: set[K] = set()

    def size(self, place: int) -> int:
        """Bytes of one use."""
        return self.ends[place + 1] - self.ends[place]

    def between(self, begin: int, end: int, apart: Collection[K]) -> int:
        """Bytes of the uses `begin` to `end`, without the groups `apart`."""
        places = [place for key in apart if begin <= (place := self.places.get(key, -1)) < end]
        return self.ends[end] - self.ends[begin] - sum(map(self.size, places))


def gather_next(
    ledger: Ledger[K], used: Collection[K], uses: Uses[K], step: int, gathering: Callable[[K], int]
) -> list[K] | None:
    """The groups that `gather_ahead` would gather if nothing must be freed; None if something may have to be.

    `used` are the groups in use; `uses` are distinct, and those before `step` are over. See Note [Decisions at every
    module].
    """
    begin = uses.firsts[step]
    reached = max(uses.reached, begin)
    for key in ledger.lost:
        if begin <= (place := uses.places.get(key, -1)) < reached:
            reached = place
    uses.kept -= ledger.lost
    ledger.lost.clear()
    uses.reached = reached
    taken = sum(ledger.held.get(key, 0) for key in used) + uses.between(begin, reached, used)
    room = ledger.room
    gather: list[K] = []
    for place in range(reached, len(uses.keys)):
        key = uses.keys[place]
        if key not in used:
            taken += uses.size(place)
            if taken > ledger.budget:
                break
            if key not in ledger.held:
                needs = gathering(key)
                if needs > room:
                    if len(ledger.held) > _worth_it(ledger, used, uses, begin, place) - len(gather):
                        return None
                    break
                gather.append(key)
                room -= needs
        reached = place + 1
    uses.reached = reached
    return gather


def _worth_it(ledger: Ledger[K], used: Collection[K], uses: Uses[K], begin: int, place: int) -> int:
    """How many groups are in use, used from `begin` to `place`, or worth keeping; those in use need memory."""
    apart = sum(begin <= uses.places.get(key, -1) < place for key in used)
    kept = len(uses.kept) - sum(key in uses.kept for key in used)
    return place - begin - apart + kept + sum(key in ledger.held for key in used)


def is_worth_holding(
    ledger: Ledger[K],
    used: Collection[K],
    uses: Uses[K],
    step: int,
    afterwards: Iterable[K],
    held: Callable[[K], int],
    key: K,
) -> bool:
    """Whether `worth_holding` includes `key`, if the distinct `uses` from `step` on come first, then `afterwards`."""
    begin = uses.firsts[step]
    place = uses.places.get(key, -1)
    taken = sum(ledger.held.get(one, 0) for one in used)
    if key in used:
        return False
    if place >= begin:
        return taken + uses.between(begin, place + 1, used) <= ledger.budget
    taken += uses.between(begin, len(uses.keys), used)
    seen: set[K] = set()
    for one in afterwards:
        if taken > ledger.budget:
            return False
        if one in used or one in seen or uses.places.get(one, -1) >= begin:
            continue
        seen.add(one)
        taken += held(one)
        if one == key:
            return taken <= ledger.budget
    return False
