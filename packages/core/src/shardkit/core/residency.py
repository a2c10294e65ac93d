"""Which parameter groups to hold unsharded within a budget of bytes: arithmetic only, knows no tensors.

Note [Held in order of use]
What is worth holding is what is used next, so the budget is filled in order of next use, beginning with what is in use,
up to the first group that does not fit. In forward the order is the rest of forward, then backward; a group that is
early in forward is late in backward, so it is the first to be freed and the last to be gathered again. For a chain of
equal groups that is the least number of gathers that the budget allows. A larger budget holds whatever a smaller one
holds, so gathers never become more as it grows; passing over what does not fit, for something small behind it, would
lose that.

A group takes more while it is gathered (its packed buffer) than it holds afterwards. What is worth holding is measured
by the latter, what can be started at a moment by the former.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

__all__ = ["Ahead", "Order", "gather_ahead", "make_room", "worth_holding"]

K = TypeVar("K", bound=Hashable)

Order: TypeAlias = Callable[[], Iterable[K]]
"""Begins the groups that are going to be used, soonest first; read no further than it takes. One may come twice."""


@dataclass(frozen=True)
class Ahead(Generic[K]):
    """The idle groups to free, then the groups to gather, in order."""

    free: tuple[K, ...]
    gather: tuple[K, ...]


def worth_holding(budget: int, in_use: int, upcoming: Order[K], held: Callable[[K], int]) -> list[K]:
    """The groups that `budget` bytes hold beside the `in_use` ones, soonest first; see Note [Held in order of use].

    `held` tells the bytes of a group that is there; it is asked only about those that fit and the one after them.
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
    """The idle groups to free so that `in_use` bytes and the rest of `idle` (bytes by group) take `budget` at most.

    First go those of which no use is known, then the one that is used last. All are freed if even that is too little.
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
    """What to gather ahead of use beside `in_use` bytes: what is worth holding, as far as it can be started now.

    `held` tells the bytes of a group that is there, `gathering` what it takes while it is gathered, and `wanted`
    whether it may be gathered now. Only groups that are not worth holding are freed for it, and no more of them than it
    takes.
    """
    hold = worth_holding(budget, in_use, upcoming, held)
    room = budget - in_use - sum(idle.values())
    spare: list[K] | None = None  # put in order only where something has to be freed
    free: list[K] = []
    gather: list[K] = []
    for key in hold:
        if key in idle or not wanted(key):
            continue
        needs = gathering(key)
        if needs > room:
            if spare is None:
                kept = set(hold)
                spare = [one for one in _last_first(idle, upcoming) if one not in kept]
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
