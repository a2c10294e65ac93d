"""How far ahead of use groups are gathered: by a depth or within a budget of bytes. A user's explicit lists come first.

Note [Prefetching]
Forward records the order in which states run; from the second iteration on, a state that begins forward starts the
gathers of those that come next in it. On streams gathers overlap with computation anyway, as the host runs ahead, so
only an order that two forwards had in common is followed there: a wrong guess would cost link time. Backward goes
through this iteration's order from its end.

With a depth, a gather is only started while at most `depth` groups hold unsharded memory, the root's and those that
were told not to reshard aside. So at most `depth + 1` groups are unsharded at any time, unless modules nest
deeper than that. What a module that runs next shares with the one that runs now (a tied parameter, or all of it if
it is repeated) stays unsharded in between. Explicit prefetch lists take the place of the order and know no such bound.

With a budget, all groups count, the root's and explicit lists included; it decides how far ahead to gather, and whether
forward frees what backward is going to need. What counts is unsharded memory, and packed buffers while their gather is
under way. A group is in use from the moment that its module begins forward, or backward, until it has ended; and while
the user holds it (`module.unshard()`). `residency.py` has the arithmetic.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shardkit.core.engine import residency
from shardkit.core.engine.context import DEFAULT_PREFETCH_DEPTH, CommContext
from shardkit.core.engine.order import Order
from shardkit.core.engine.param_group import FSDPParamGroup
from shardkit.core.engine.residency import LastFirst, Ledger, Uses

__all__ = ["Prefetch", "PrefetchPolicy"]

_Reference: TypeAlias = weakref.ReferenceType[FSDPParamGroup]

_Upcoming: TypeAlias = Callable[[], Iterable[tuple[FSDPParamGroup, bool]]]
"""Begins the groups in the order in which they are going to be used, and whether backward is what uses them.

What reads it stops as soon as the budget is full.
"""


@dataclass(frozen=True)
class Prefetch:
    """What the user has set: a depth, a budget in bytes, or neither, which is a depth of one."""

    depth: int | None = None
    budget: int | None = None

    @property
    def groups_ahead(self) -> int:
        """How many groups are gathered ahead, where no budget says so."""
        return DEFAULT_PREFETCH_DEPTH if self.depth is None else self.depth

    def policy(self, order: Order) -> PrefetchPolicy:
        """What decides for the groups in `order`."""
        return _ByDepth(self.groups_ahead, order) if self.budget is None else _ByBudget(self.budget, order)


class PrefetchPolicy(Protocol):
    """Decides which groups are gathered ahead of use, kept or freed.

    Attributes:
        slots: how many groups may hold memory that forward is to free (`CommContext.slots`).
    """

    slots: int

    def make_room(self, needed: Sequence[FSDPParamGroup], *, in_backward: bool) -> None:
        """Before `needed`, which are used now, are gathered.

        Raises:
            ValueError: if they do not fit beside what is in use.
        """

    def gather_ahead(self, context: CommContext, *, in_backward: bool) -> list[FSDPParamGroup]:
        """Starts gathers of what comes next in the order; returns the groups that stay unsharded for it."""

    def gather_listed(self, listed: Sequence[FSDPParamGroup], *, in_backward: bool) -> list[FSDPParamGroup]:
        """Starts gathers of what the user has listed; returns the groups that are to be freed if they go unused."""

    def worth_keeping(self, groups: Sequence[FSDPParamGroup]) -> Sequence[FSDPParamGroup]:
        """Those of `groups` that are to stay unsharded until their next use, though forward has ended for them."""


class _ByDepth:
    """At most `depth` groups ahead of the one in use."""

    def __init__(self, depth: int, order: Order) -> None:
        self.slots = depth + 1
        self._depth = depth
        self._order = order

    def make_room(self, needed: Sequence[FSDPParamGroup], *, in_backward: bool) -> None:
        """`CommContext.make_room` does, when the gather starts."""

    def gather_ahead(self, context: CommContext, *, in_backward: bool) -> list[FSDPParamGroup]:
        ahead = []
        for state in self._order.next_states(self._depth, in_backward=in_backward):
            if state.is_root:
                continue
            if context.unsharded > self._depth:
                break
            for group in state.groups:
                if in_backward and not group.settings.unshard_in_backward:
                    continue
                if not group.is_unsharded:
                    group.unshard(in_backward=in_backward)
                elif in_backward or not (group.forward_users and group.settings.reshard_after_forward):
                    continue
                ahead.append(group)  # a tied or repeated module's own, too: it stays for the next
        return ahead

    def gather_listed(self, listed: Sequence[FSDPParamGroup], *, in_backward: bool) -> list[FSDPParamGroup]:
        for group in listed:
            group.unshard(in_backward=in_backward)
        return []

    def worth_keeping(self, groups: Sequence[FSDPParamGroup]) -> Sequence[FSDPParamGroup]:
        return ()


class _ByBudget:
    """At most `nbytes` of the unsharded memory of all groups of one root."""

    slots = 1

    def __init__(self, nbytes: int, order: Order) -> None:
        self._nbytes = nbytes
        self._order = order
        self._ledger: Ledger[_Reference] = Ledger()
        self._noted: dict[_Reference, None] = {}  # those in use, and some that have been
        # What is going to be used, by whether in backward: which change of the order it is of, passes then, the uses.
        self._uses: dict[bool, tuple[int, int, Uses[_Reference]]] = {}
        # In a forward that had to free something: which forward, what to free next, and the step at which it was said.
        self._spare: tuple[tuple[int, int], LastFirst[_Reference]] | None = None
        self._spare_from = 0
        for group in order.groups:
            group.ledger = self._ledger
            if group.is_unsharded:
                self._ledger.put(group.reference, group.held_bytes)
            if group.in_use:
                self._noted[group.reference] = None

    def _uses_in(self, *, backward: bool) -> tuple[Uses[_Reference], int]:
        """What forward or backward is going to use, and the step from which on it still is."""
        order = self._order
        known = self._uses.get(backward)
        if known is None or known[0] != order.changes[backward]:
            states = map(order.state_at, order.expected(in_backward=backward))
            groups = (
                [group for group in state.groups if group.settings.unshard_in_backward or not backward] if state else []
                for state in states
            )
            uses = Uses([[group.reference for group in step] for step in groups], _held)
            known = self._uses[backward] = order.changes[backward], len(order.passes), uses
        _, passes, uses = known
        return uses, passes - len(order.passes) if backward else order.cursor

    def make_room(self, needed: Sequence[FSDPParamGroup], *, in_backward: bool) -> None:
        more = 0
        for group in needed:
            self._noted[group.reference] = None
            group.refresh()
            more += group.bytes_when_used(in_backward=in_backward) - self._ledger.held.get(group.reference, 0)
        excess = self._ledger.total + more - self._nbytes
        if excess <= 0:
            return
        used = [group for group in self._in_use() if group not in needed]
        in_use = sum(group.held_bytes for group in used)
        for group in needed:
            nbytes = group.bytes_when_used(in_backward=in_backward)
            if in_use + nbytes > self._nbytes:
                beside = [*used, *needed[: needed.index(group)]]
                raise ValueError(_too_small(self._nbytes, group, nbytes, beside, in_use))
            in_use += nbytes
        uses, step = self._uses_in(backward=False)
        if self._order.in_forward and uses.distinct:
            self._free(self._last_used(excess, uses, step, needed))
            return
        idle = _idle(group for group in self._there() if group not in needed)
        self._free(residency.make_room(self._nbytes, in_use, idle, lambda: _not_in_use(self._order.upcoming)))

    def _last_used(
        self, excess: int, uses: Uses[_Reference], step: int, needed: Sequence[FSDPParamGroup]
    ) -> list[FSDPParamGroup]:
        """Of the idle groups but `needed`, in forward, those that are used last: enough to free `excess` bytes."""
        spare = self._sorted()
        if spare is None:
            spare = LastFirst([group.reference for group in self._there()], self._place)
            self._spare = self._forward, spare
        else:
            skipped = uses.keys[uses.firsts[self._spare_from] : uses.firsts[step]]
            for key in (*skipped, *self._ledger.gained):
                spare.add(key)
        self._spare_from = step
        self._ledger.gained.clear()

        def is_idle(key: _Reference) -> bool:
            group = key()
            return key in self._ledger.held and (group is None or not (group.in_use or group in needed))

        free = []
        while excess > 0 and (last := spare.take(is_idle)) is not None:
            excess -= self._ledger.held[last]
            if (group := last()) is None:
                self._ledger.drop(last)
            else:
                free.append(group)
        return free

    @property
    def _forward(self) -> tuple[int, int]:
        """Another value where what is known of later uses is not what it was, but for uses that came and went."""
        return self._order.changes[False], self._order.dropped

    def _sorted(self) -> LastFirst[_Reference] | None:
        """What this forward has sorted so far."""
        if self._spare is not None and self._spare[0] != self._forward:
            self._spare = None
        return None if self._spare is None else self._spare[1]

    def _place(self, key: _Reference) -> tuple[int, ...]:
        """Sorts groups in forward: the smaller, the later one is used next."""
        group = key()
        if group is None:
            return (0,)
        uses, step = self._uses_in(backward=False)
        place = uses.places.get(key, -1)
        if place >= uses.firsts[step]:
            return 2, -place
        awaited = self._order.place_in_backward(group)
        return (0,) if awaited is None else (1, *awaited)

    def _free(self, groups: Sequence[FSDPParamGroup]) -> None:
        for group in groups:
            group.reshard(keep=self._order.place_in_backward(group) is not None)

    def gather_ahead(self, context: CommContext, *, in_backward: bool) -> list[FSDPParamGroup]:
        uses, step = self._uses_in(backward=in_backward)
        if uses.distinct:
            more = residency.gather_next(
                self._nbytes, self._ledger, self._used(), uses, step, lambda key: _gathering(key, in_backward)
            )
            if more is not None:
                gathered = self._gather([group for key in more if (group := key()) is not None], in_backward)
                if len(gathered) < len(more):
                    uses.reached = 0
                return gathered
        return self._gather_of(self._order.upcoming, in_backward)

    def gather_listed(self, listed: Sequence[FSDPParamGroup], *, in_backward: bool) -> list[FSDPParamGroup]:
        def upcoming() -> Iterator[tuple[FSDPParamGroup, bool]]:
            yield from ((group, in_backward) for group in listed)
            yield from ((group, backward) for group, backward in self._order.upcoming() if backward != in_backward)

        return self._gather_of(upcoming, in_backward)

    def _gather_of(self, upcoming: _Upcoming, backward: bool) -> list[FSDPParamGroup]:
        """Gathers what there is room for, of that which the phase that runs now is going to use; returns it."""
        used_in_backward: dict[FSDPParamGroup, bool] = {}

        def order() -> Iterator[FSDPParamGroup]:
            for group, in_backward in upcoming():
                if not group.in_use:
                    used_in_backward.setdefault(group, in_backward)
                    yield group

        there = self._there()
        ahead = residency.gather_ahead(
            self._nbytes,
            sum(group.held_bytes for group in there if group.in_use),
            _idle(there),
            order,
            held=lambda group: group.unsharded_bytes,
            gathering=lambda group: group.bytes_when_used(in_backward=used_in_backward[group]),
            wanted=lambda group: used_in_backward[group] == backward,
        )
        self._free(ahead.free)
        return self._gather(ahead.gather, backward)

    def _gather(self, groups: Sequence[FSDPParamGroup], backward: bool) -> list[FSDPParamGroup]:
        for position, group in enumerate(groups):
            if group.refresh():  # its size was another one
                return list(groups[:position])
            group.unshard(in_backward=backward)
        return list(groups)

    def worth_keeping(self, groups: Sequence[FSDPParamGroup]) -> Sequence[FSDPParamGroup]:
        order = self._order
        uses, step = self._uses_in(backward=False) if order.in_forward else (Uses[_Reference]([], _held), 0)
        if not uses.distinct:
            in_use = sum(group.held_bytes for group in self._there() if group.in_use)
            hold = residency.worth_holding(
                self._nbytes, in_use, lambda: _not_in_use(order.upcoming), lambda group: group.unsharded_bytes
            )
            return [group for group in groups if group in hold]
        used = self._used()

        def worth_holding(group: FSDPParamGroup) -> bool:
            then = (other.reference for other in order.awaited_by_backward())
            return residency.is_worth_holding(
                self._nbytes, self._ledger, used, uses, step, then, _held, group.reference
            )

        kept = [group for group in groups if worth_holding(group)]
        over = (group.reference for group in kept if uses.places.get(group.reference, -1) < uses.firsts[step])
        uses.kept.update(over)
        return kept

    def _used(self) -> Collection[_Reference]:
        """The groups in use."""
        spare = self._sorted()
        for key in list(self._noted):
            group = key()
            if group is None or not group.in_use:
                del self._noted[key]
                if spare is not None:
                    spare.add(key)
        return self._noted.keys()

    def _in_use(self) -> list[FSDPParamGroup]:
        """Those of them that have memory."""
        groups = (key() for key in self._noted if key in self._ledger.held)
        return [group for group in groups if group is not None and group.in_use]

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


def _not_in_use(upcoming: _Upcoming) -> Iterator[FSDPParamGroup]:
    return (group for group, _ in upcoming() if not group.in_use)


def _too_small(budget: int, group: FSDPParamGroup, nbytes: int, beside: Sequence[FSDPParamGroup], in_use: int) -> str:
    names = ", ".join(sorted(f"'{other.label}'" for other in beside))
    taken = f" beside the {in_use} bytes of what is in use with it ({names})" if beside else ""
    return (
        f"the prefetch budget of {budget} bytes does not hold group '{group.label}', which takes {nbytes} bytes "
        f"unsharded{taken}. Give set_prefetch_budget at least {in_use + nbytes} bytes, or shard the module in smaller "
        "groups"
    )
