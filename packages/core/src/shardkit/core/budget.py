"""Prefetching within a budget of bytes: which groups are gathered ahead, kept or freed. `residency` has the arithmetic.

What counts is unsharded memory, and packed buffers while their gather is under way. A group is in use from the moment
that its module begins forward, or backward, until it has ended; and while the user holds it (`module.unshard()`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

from shardkit.core import residency
from shardkit.core.param_group import FSDPParamGroup
from shardkit.core.residency import Ledger, Uses

__all__ = ["Budget", "GroupUses", "Upcoming", "uses_of"]

_Reference: TypeAlias = weakref.ReferenceType[FSDPParamGroup]

GroupUses: TypeAlias = Uses[_Reference]

Upcoming: TypeAlias = Callable[[], Iterable[tuple[FSDPParamGroup, bool]]]
"""Begins the groups in the order in which they are going to be used, and whether backward is what uses them.

What reads it stops as soon as the budget is full.
"""


def uses_of(steps: Iterable[Sequence[FSDPParamGroup]]) -> GroupUses:
    """The order in which modules with these groups are going to run."""
    return Uses([[group.reference for group in step] for step in steps], _held)


class Budget:
    """At most `nbytes` of the unsharded memory of `groups`, all groups of one root."""

    def __init__(self, nbytes: int, groups: Iterable[FSDPParamGroup]) -> None:
        self.nbytes = nbytes
        self._ledger: Ledger[_Reference] = Ledger()
        self._noted: dict[_Reference, None] = {}  # those in use, and some that have been
        for group in groups:
            group.ledger = self._ledger
            if group.is_unsharded:
                self._ledger.put(group.reference, group.held_bytes)
            if group.in_use:
                self._noted[group.reference] = None

    def make_room(self, needed: Sequence[FSDPParamGroup], upcoming: Upcoming, backward: bool) -> None:
        """Frees idle groups so that `needed`, which are used now, can be gathered.

        Raises:
            ValueError: if they do not fit beside the groups in use, with the name and bytes of the one that does not.
        """
        more = 0
        for group in needed:
            self._noted[group.reference] = None
            group.refresh()
            more += group.bytes_when_used(in_backward=backward) - self._ledger.held.get(group.reference, 0)
        if self._ledger.total + more <= self.nbytes:
            return
        others = [group for group in self._there() if group not in needed]
        used = [group for group in others if group.in_use]
        in_use = sum(group.held_bytes for group in used)
        for group in needed:
            nbytes = group.bytes_when_used(in_backward=backward)
            if in_use + nbytes > self.nbytes:
                beside = [*used, *needed[: needed.index(group)]]
                raise ValueError(_too_small(self.nbytes, group, nbytes, beside, in_use))
            in_use += nbytes
        _free(residency.make_room(self.nbytes, in_use, _idle(others), lambda: _not_in_use(upcoming)), upcoming)

    def prefetch(
        self, upcoming: Upcoming, backward: bool, uses: GroupUses | None = None, step: int = 0
    ) -> list[FSDPParamGroup]:
        """Gathers ahead what there is room for, of that which the phase that runs now is going to use; returns it.

        `uses`, from `step` on, are what this phase is going to use of `upcoming`, if that is known in advance.
        """
        if uses is not None and uses.distinct:
            more = residency.gather_next(
                self.nbytes, self._ledger, self._used(), uses, step, lambda key: _gathering(key, backward)
            )
            if more is not None:
                gathered = self._gather([group for key in more if (group := key()) is not None], backward)
                if len(gathered) < len(more):
                    uses.reached = 0
                return gathered
        return self._prefetch(upcoming, backward)

    def _prefetch(self, upcoming: Upcoming, backward: bool) -> list[FSDPParamGroup]:
        used_in_backward: dict[FSDPParamGroup, bool] = {}

        def order() -> Iterator[FSDPParamGroup]:
            for group, in_backward in upcoming():
                if not group.in_use:
                    used_in_backward.setdefault(group, in_backward)
                    yield group

        there = self._there()
        ahead = residency.gather_ahead(
            self.nbytes,
            sum(group.held_bytes for group in there if group.in_use),
            _idle(there),
            order,
            held=lambda group: group.unsharded_bytes,
            gathering=lambda group: group.bytes_when_used(in_backward=used_in_backward[group]),
            wanted=lambda group: used_in_backward[group] == backward,
        )
        _free(ahead.free, upcoming)
        return self._gather(ahead.gather, backward)

    def _gather(self, groups: Sequence[FSDPParamGroup], backward: bool) -> list[FSDPParamGroup]:
        for position, group in enumerate(groups):
            if group.refresh():  # its size was another one
                return list(groups[:position])
            group.unshard(in_backward=backward)
        return list(groups)

    def worth_keeping(
        self,
        groups: Sequence[FSDPParamGroup],
        upcoming: Upcoming,
        uses: GroupUses,
        step: int,
        afterwards: Callable[[], Iterable[FSDPParamGroup]],
    ) -> list[FSDPParamGroup]:
        """Those of `groups`, whose module has ended, that are to stay unsharded until they are used again.

        `upcoming` are `uses`, from `step` on, which is what forward is going to use, and then `afterwards`.
        """
        if not uses.distinct:
            in_use = sum(group.held_bytes for group in self._there() if group.in_use)
            hold = residency.worth_holding(
                self.nbytes, in_use, lambda: _not_in_use(upcoming), lambda group: group.unsharded_bytes
            )
            return [group for group in groups if group in hold]
        used = self._used()

        def worth_holding(group: FSDPParamGroup) -> bool:
            then = (other.reference for other in afterwards())
            return residency.is_worth_holding(self.nbytes, self._ledger, used, uses, step, then, _held, group.reference)

        kept = [group for group in groups if worth_holding(group)]
        over = (group.reference for group in kept if uses.places.get(group.reference, -1) < uses.firsts[step])
        uses.kept.update(over)
        return kept

    def _used(self) -> Collection[_Reference]:
        """The groups in use."""
        for key in list(self._noted):
            group = key()
            if group is None or not group.in_use:
                del self._noted[key]
        return self._noted.keys()

    def _there(self) -> list[FSDPParamGroup]:
        """The groups that are unsharded, oldest first: an order that is the same on all ranks."""
        there = []
        for key in list(self._ledger.held):
            group = key()
            if group is None:  # it was deleted, with its memory
                self._ledger.drop(key)
            else:
                there.append(group)
        return there


def _held(key: _Reference) -> int:
    group = key()
    return 0 if group is None else group.unsharded_bytes


def _gathering(key: _Reference, backward: bool) -> int:
    group = key()
    return 0 if group is None else group.bytes_when_used(in_backward=backward)


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
    names = ", ".join(sorted(f"'{other.label}'" for other in beside))
    taken = f" beside the {in_use} bytes of what is in use with it ({names})" if beside else ""
    return (
        f"the prefetch budget of {budget} bytes does not hold group '{group.label}', which takes {nbytes} bytes "
        f"unsharded{taken}. Give set_prefetch_budget at least {in_use + nbytes} bytes, or shard the module in smaller "
        "groups"
    )
