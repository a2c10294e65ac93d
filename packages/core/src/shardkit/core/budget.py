"""Prefetching within a budget of bytes: which groups are gathered ahead, kept or freed. `residency` has the arithmetic.

What counts is unsharded memory, and packed buffers while their gather is under way. A group is in use from the moment
that its module begins forward, or backward, until it has ended; and while the user holds it (`module.unshard()`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from shardkit.core import residency
from shardkit.core.param_group import FSDPParamGroup

__all__ = ["Upcoming", "make_room", "prefetch", "worth_keeping"]

Upcoming: TypeAlias = Callable[[], Iterable[tuple[FSDPParamGroup, bool]]]
"""Begins the groups in the order in which they are going to be used, and whether backward is what uses them.

It is asked at every module, so what reads it stops as soon as the budget is full.
"""


def make_room(
    budget: int,
    needed: Sequence[FSDPParamGroup],
    everyone: Sequence[FSDPParamGroup],
    upcoming: Upcoming,
    backward: bool,
) -> None:
    """Frees idle groups so that `needed`, which are used now, can be gathered.

    Raises:
        ValueError: if they do not fit beside the groups in use, with the name and bytes of the one that does not.
    """
    others = [group for group in everyone if group.is_unsharded and group not in needed]
    used = [group for group in others if group.in_use]
    in_use = sum(group.held_bytes for group in used)
    for group in needed:
        group.refresh()
        nbytes = group.bytes_when_used(in_backward=backward)
        if in_use + nbytes > budget:
            raise ValueError(_too_small(budget, group, nbytes, [*used, *needed[: needed.index(group)]], in_use))
        in_use += nbytes
    _free(residency.make_room(budget, in_use, _idle(others), lambda: _not_in_use(upcoming)), upcoming)


def prefetch(
    budget: int, everyone: Sequence[FSDPParamGroup], upcoming: Upcoming, backward: bool
) -> list[FSDPParamGroup]:
    """Gathers ahead what the budget has room for, of that which the phase that runs now is going to use; returns it."""
    used_in_backward: dict[FSDPParamGroup, bool] = {}

    def order() -> Iterator[FSDPParamGroup]:
        for group, in_backward in upcoming():
            if not group.in_use:
                used_in_backward.setdefault(group, in_backward)
                yield group

    there = [group for group in everyone if group.is_unsharded]
    ahead = residency.gather_ahead(
        budget,
        _in_use(there),
        _idle(there),
        order,
        held=lambda group: group.unsharded_bytes,
        gathering=lambda group: group.bytes_when_used(in_backward=used_in_backward[group]),
        wanted=lambda group: used_in_backward[group] == backward,
    )
    _free(ahead.free, upcoming)
    for position, group in enumerate(ahead.gather):
        if group.refresh():  # its size was another one
            return list(ahead.gather[:position])
        group.unshard(in_backward=backward)
    return list(ahead.gather)


def worth_keeping(budget: int, everyone: Sequence[FSDPParamGroup], upcoming: Upcoming) -> Sequence[FSDPParamGroup]:
    """The groups not in use that are to stay unsharded until they are used again."""
    in_use = _in_use(group for group in everyone if group.is_unsharded)
    return residency.worth_holding(budget, in_use, lambda: _not_in_use(upcoming), lambda group: group.unsharded_bytes)


def _in_use(there: Iterable[FSDPParamGroup]) -> int:
    return sum(group.held_bytes for group in there if group.in_use)


def _idle(there: Iterable[FSDPParamGroup]) -> dict[FSDPParamGroup, int]:
    return {group: group.held_bytes for group in there if not group.in_use}


def _not_in_use(upcoming: Upcoming) -> Iterator[FSDPParamGroup]:
    return (group for group, _ in upcoming() if not group.in_use)


def _free(groups: Sequence[FSDPParamGroup], upcoming: Upcoming) -> None:
    if not groups:
        return
    awaited = {group for group, in_backward in upcoming() if in_backward}
    for group in groups:
        group.reshard(keep=group in awaited)


def _too_small(budget: int, group: FSDPParamGroup, nbytes: int, beside: Sequence[FSDPParamGroup], in_use: int) -> str:
    names = ", ".join(f"'{other.label}'" for other in beside)
    taken = f" beside the {in_use} bytes of what is in use with it ({names})" if beside else ""
    return (
        f"the prefetch budget of {budget} bytes does not hold group '{group.label}', which takes {nbytes} bytes "
        f"unsharded{taken}. Give set_prefetch_budget at least {in_use + nbytes} bytes, or shard the module in smaller "
        "groups"
    )
