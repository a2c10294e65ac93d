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

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Ahead", "Use", "gather_ahead", "make_room", "worth_holding"]

K = TypeVar("K", bound=Hashable)


class Use(NamedTuple):
    """What a group that is going to be used holds once it is there, and takes while it is gathered, in bytes."""

    held: int
    gathering: int


@dataclass(frozen=True)
class Ahead(Generic[K]):
    """The idle groups to free, then the groups to gather, in order."""

    free: tuple[K, ...]
    gather: tuple[K, ...]


def worth_holding(budget: int, in_use: int, upcoming: Sequence[K], use: Callable[[K], Use]) -> dict[K, Use]:
    """The groups that `budget` bytes hold beside the `in_use` ones; see Note [Held in order of use].

    `upcoming` has the groups that are going to be used, soonest first; one that comes twice counts once. `use` tells
    the bytes of one; it is asked only about those that are held and the one after them.
    """
    hold: dict[K, Use] = {}
    taken = in_use
    for key in upcoming:
        if key in hold:
            continue
        nbytes = use(key)
        taken += nbytes.held
        if taken > budget:
            break
        hold[key] = nbytes
    return hold


def make_room(budget: int, in_use: int, idle: Mapping[K, int], upcoming: Sequence[K]) -> tuple[K, ...]:
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
    upcoming: Sequence[K],
    use: Callable[[K], Use],
    wanted: Callable[[K], bool],
) -> Ahead[K]:
    """What to gather ahead of use beside `in_use` bytes: what is worth holding, as far as it can be started now.

    `wanted` tells what may be gathered now. Only groups that are not worth holding are freed for it, and no more of
    them than it takes.
    """
    hold = worth_holding(budget, in_use, upcoming, use)
    spare = [key for key in _last_first(idle, upcoming) if key not in hold]
    room = budget - in_use - sum(idle.values())
    free: list[K] = []
    gather: list[K] = []
    for key, nbytes in hold.items():
        if key in idle or not wanted(key):
            continue
        if nbytes.gathering > room + sum(idle[one] for one in spare):
            break
        while nbytes.gathering > room:
            free.append(spare.pop(0))
            room += idle[free[-1]]
        gather.append(key)
        room -= nbytes.gathering
    return Ahead(tuple(free), tuple(gather))


def _last_first(idle: Mapping[K, int], upcoming: Sequence[K]) -> list[K]:
    next_use = {key: position for position, key in reversed(list(enumerate(upcoming)))}
    return sorted(idle, key=lambda key: next_use.get(key, len(upcoming)), reverse=True)
