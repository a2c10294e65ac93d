"""How far ahead groups are gathered: by a depth or within a budget of bytes. A user's explicit lists take precedence.

Note [Prefetching]
Forward records the order in which states run. From the second iteration on, a state that begins forward starts the
gathers of the next ones. On streams gathers overlap with computation anyway, because the host runs ahead, so the order
is only followed if two forwards had it in common: a wrong guess would cost link time. Backward follows this iteration's
order from its end.

With a depth, a gather only starts while at most `depth` groups hold unsharded memory, not counting the root's and those
set not to reshard. So at most `depth + 1` groups are unsharded at any time, unless modules nest deeper than that.
Parameters that the next module shares with the running one (a tied parameter, or all of them if it is repeated) stay
unsharded in between. Explicit prefetch lists replace the order and have no such bound.
With a budget, all groups count, including the root's and those in explicit lists. It decides how far ahead to gather,
and whether forward frees groups that backward will need. It counts unsharded memory, and packed buffers during their
gather. A group is in use from the beginning of its module's forward, or backward, until its end, and while the user
holds it (`module.unshard()`). `residency.py` has the arithmetic.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shardkit.core.engine import residency
from shardkit.core.engine.context import DEFAULT_PREFETCH_DEPTH, CommContext
from shardkit.core.engine.order import Order
from shardkit.core.engine.param_group import FSDPParamGroup, Residence
from shardkit.core.engine.residency import LastFirst, Ledger, Uses

__all__ = ["Prefetch", "PrefetchPolicy"]

_Reference: TypeAlias = weakref.ReferenceType[FSDPParamGroup]

_Upcoming: TypeAlias = Callable[[], Iterable[tuple[FSDPParamGroup, bool]]]
"""Yields upcoming groups in order of use, each with whether backward uses it.

The reader stops when the budget is full.
"""


@dataclass(frozen=True)
class Prefetch:
    """The user's setting: a depth, a budget in bytes, or neither, which means a depth of one."""

    depth: int | None = None
    budget: int | None = None

    @property
    def groups_ahead(self) -> int:
        """Number of groups that are gathered ahead without a budget."""
        return DEFAULT_PREFETCH_DEPTH if self.depth is None else self.depth

    def policy(self, order: Order) -> PrefetchPolicy:
        """The policy for the groups in `order`."""
        return _ByDepth(self.groups_ahead, order) if self.budget is None else _ByBudget(self.budget, order)


class PrefetchPolicy(Protocol):
    """Decides which groups are gathered ahead of use, kept or freed.

    Attributes:
        slots: number of groups that may hold memory that forward frees (`CommContext.slots`).
        released_for_backward: number of released groups whose memory stays for the backward of a forward.
    """

    slots: int
    released_for_backward: int

    def make_room(self, needed: Sequence[FSDPParamGroup], *, in_backward: bool) -> None:
        """Frees memory before the groups `needed`, which are used now, are gathered.

        Raises:
            ValueError: if they do not fit beside the groups in use.
        """

    def release_ahead(self, used: Sequence[FSDPParamGroup]) -> None:
        """Where the next groups are not known, so that nothing is gathered ahead: releases memory for their gather.

        `used` are those that forward uses now; the next are taken to be as large. Memory that is released before they
        compute can be gathered into while they do. If it is not needed, it is still there when its group is used.
        """

    def gather_ahead(self, context: CommContext, *, in_backward: bool) -> list[FSDPParamGroup]:
        """Starts gathers of the next groups in the order; returns the groups that stay unsharded for it."""

    def gather_listed(self, listed: Sequence[FSDPParamGroup], *, in_backward: bool) -> list[FSDPParamGroup]:
        """Starts gathers of the groups that the user listed; returns those to free if they are not used."""

    def worth_keeping(self, groups: Sequence[FSDPParamGroup]) -> Sequence[FSDPParamGroup]:
        """The groups of `groups` to keep unsharded until their next use, although forward has ended for them."""


class _ByDepth:
    """At most `depth` groups ahead of the one in use."""

    released_for_backward = 1

    def __init__(self, depth: int, order: Order) -> None:
        self.slots = depth + 1
        self._depth = depth
        self._order = order
        for group in order.groups:
            group.ledger = None

    def make_room(self, needed: Sequence[FSDPParamGroup], *, in_backward: bool) -> None:
        """Does nothing: `CommContext.make_room` frees memory when the gather starts."""

    def release_ahead(self, used: Sequence[FSDPParamGroup]) -> None:
        """Does nothing: every group is released when its forward ends."""

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
                ahead.append(group)  # even a tied or repeated module's own: it is kept for the next use
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
    released_for_backward = sys.maxsize  # they are within the budget

    def __init__(self, nbytes: int, order: Order) -> None:
        self._order = order
        self._ledger: Ledger[_Reference] = Ledger(nbytes)
        self._noted: dict[_Reference, None] = {}  # those in use, and some earlier ones
        # Upcoming uses, for forward (False) and backward (True): the order's change count and its number of passes when
        # they were computed, and the uses.
        self._uses: dict[bool, tuple[int, int, Uses[_Reference]]] = {}
        # Set if this forward had to free a group: the value of `_forward` then, and the groups to free next.
        self._spare: tuple[tuple[int, int], LastFirst[_Reference]] | None = None
        self._spare_from = 0  # the step of that decision
        for group in order.groups:
            group.ledger = self._ledger
            if group.is_unsharded:
                self._ledger.put(group.reference, group.held_bytes)
            if group.in_use:
                self._noted[group.reference] = None

    def _uses_in(self, *, backward: bool) -> tuple[Uses[_Reference], int]:
        """The groups that forward or backward will use, and the step from which on they are still to come."""
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
        excess = more - self._ledger.room
        if excess <= 0:
            return
        used = [group for group in self._in_use() if group not in needed]
        in_use = sum(group.held_bytes for group in used)
        for group in needed:
            nbytes = group.bytes_when_used(in_backward=in_backward)
            if in_use + nbytes > self._ledger.budget:
                beside = [*used, *needed[: needed.index(group)]]
                raise ValueError(_too_small(self._ledger.budget, group, nbytes, beside, in_use))
            in_use += nbytes
        uses, step = self._uses_in(backward=False)
        if self._order.in_forward and uses.distinct:
            self._free(self._last_used(excess, uses, step, needed))
            return
        idle = _idle(group for group in self._there() if group not in needed)
        self._free(residency.make_room(self._ledger.budget, in_use, idle, lambda: _not_in_use(self._order.upcoming)))

    def release_ahead(self, used: Sequence[FSDPParamGroup]) -> None:
        excess = sum(group.held_bytes for group in used) - self._ledger.room
        uses, step = self._uses_in(backward=False)
        if excess > 0 and uses.distinct:
            for group in self._last_used(excess, uses, step, used):
                if group.residence is Residence.UNSHARDED and group.can_be_released and not group.prefetched:
                    group.reshard(keep=self._order.place_in_backward(group) is not None, release=True)
                elif self._spare is not None:
                    self._spare[1].add(group.reference)

    def _last_used(
        self, excess: int, uses: Uses[_Reference], step: int, needed: Sequence[FSDPParamGroup]
    ) -> list[FSDPParamGroup]:
        """In forward, the idle groups except `needed` that are used last: enough to free `excess` bytes."""
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

        taken: set[_Reference] = set()  # the spare ones may name a group twice

        def is_idle(key: _Reference) -> bool:
            group = key()
            held = key in self._ledger.held and key not in taken
            return held and (group is None or not (group.in_use or group in needed))

        free = []
        while excess > 0 and (last := spare.take(is_idle)) is not None:
            taken.add(last)
            excess -= self._ledger.held[last]
            if (group := last()) is None:
                self._ledger.drop(last)
            else:
                free.append(group)
        return free

    @property
    def _forward(self) -> tuple[int, int]:
        """A value that changes when the known later uses change other than by being over."""
        return self._order.changes[False], self._order.dropped

    def _sorted(self) -> LastFirst[_Reference] | None:
        """The groups that this forward has sorted so far, or None."""
        if self._spare is not None and self._spare[0] != self._forward:
            self._spare = None
        return None if self._spare is None else self._spare[1]

    def _place(self, key: _Reference) -> tuple[int, ...]:
        """A sort key for groups in forward: the smaller, the later their next use."""
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
                self._ledger, self._used(), uses, step, lambda key: _gathering(key, in_backward)
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
        """Gathers as many of the groups that the current phase will use as fit; returns them."""
        used_in_backward: dict[FSDPParamGroup, bool] = {}

        def order() -> Iterator[FSDPParamGroup]:
            for group, in_backward in upcoming():
                if not group.in_use:
                    used_in_backward.setdefault(group, in_backward)
                    yield group

        there = self._there()
        ahead = residency.gather_ahead(
            self._ledger.budget,
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
            if group.refresh():  # its size has changed
                return list(groups[:position])
            group.unshard(in_backward=backward)
        return list(groups)

    def worth_keeping(self, groups: Sequence[FSDPParamGroup]) -> Sequence[FSDPParamGroup]:
        order = self._order
        uses, step = self._uses_in(backward=False) if order.in_forward else (Uses[_Reference]([], _held), 0)
        if not uses.distinct:
            in_use = sum(group.held_bytes for group in self._there() if group.in_use)
            hold = residency.worth_holding(
                self._ledger.budget, in_use, lambda: _not_in_use(order.upcoming), lambda group: group.unsharded_bytes
            )
            return [group for group in groups if group in hold]
        used = self._used()

        def worth_holding(group: FSDPParamGroup) -> bool:
            then = (other.reference for other in order.awaited_by_backward())
            return residency.is_worth_holding(self._ledger, used, uses, step, then, _held, group.reference)

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
        """Those groups in use that have memory."""
        groups = (key() for key in self._noted if key in self._ledger.held)
        return [group for group in groups if group is not None and group.in_use]

    def _there(self) -> list[FSDPParamGroup]:
        """The unsharded groups, oldest first: an order that is the same on all ranks."""
        there = []
        for key in list(self._ledger.held):
            group = key()
            if group is None:  # deleted, with its memory
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
    taken = f" beside the {in_use} bytes of groups that are in use with it ({names})" if beside else ""
    return (
        f"the prefetch budget of {budget} bytes does not hold group '{group.label}', which takes {nbytes} bytes "
        f"unsharded{taken}. Give set_prefetch_budget at least {in_use + nbytes} bytes, or shard the module in smaller "
        "groups"
    )
