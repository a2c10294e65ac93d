"""One per root: order of use, prefetching, end of forward and backward, recovery.

Note [Who owns whom]
A module owns its state (through its hooks), a state its groups and this object; nothing points back but weakly. So
deleting a model frees its memory at once, without a garbage collection.

Note [Prefetching]
Forward learns the order in which states run; from the second iteration on, a state that begins forward starts the
gathers of those that come next in it. On streams gathers overlap with computation anyway, as the host runs ahead, so
only an order that two forwards had in common is followed there: a wrong guess would cost link time. Backward goes
through this iteration's order from its end. Either way a gather is only started while at most `prefetch_depth` groups
hold unsharded memory, the root's and those that were told not to reshard aside. That is the promise: at most
`prefetch_depth + 1` groups are unsharded at any time, unless modules nest deeper than that. What a module that runs
next shares with the one that runs now (a tied parameter, or all of it if it is repeated) stays unsharded in between. A
user's explicit prefetch lists take the place of the learnt order and know no such bound.
With a budget of bytes instead (`budget`), all groups count, the root's and explicit lists included; it decides how far
ahead to gather, and whether forward frees what backward is going to need.

Note [Ready in order]
A block may keep a tensor aside (`self.aux = ...`) that its caller adds to the loss. Backward then enters the block
through a tensor that no hook of ours sits on, and must find its parameters there. Autograd runs the nodes of one device
in the reverse of the order in which forward made them. So a state's parameters are waited for before backward can get
to any node that its forward made: when backward leaves the state that ran next in forward (`left_backward`), or, if
nothing would tell us that, as soon as backward enters that state (`entered_backward`). Nothing would if the state is
nested in the other one, or if the other's inputs need no gradient. Whatever order a backward takes, parameters whose
gather is under way are never left for autograd to find half-filled.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardkit.core import events
from shardkit.core.budget import Budget, GroupUses, uses_of
from shardkit.core.context import DEFAULT_PREFETCH_DEPTH, CommContext
from shardkit.core.on_stack import calling_frame, is_on_stack, runs_elsewhere
from shardkit.core.param_group import FSDPParamGroup
from shardkit.core.torch_compat import (
    in_backward,
    outside_transforms,
    queue_end_of_backward,
    runs_in_this_backward,
    transforms_active,
)

if TYPE_CHECKING:
    from types import FrameType

    from shardkit.core.state import FSDPState

__all__ = ["Iteration", "Pass"]

# Entries of forwards that no backward followed are dropped beyond this many.
_LONGEST = 10_000


class Pass(NamedTuple):
    """A forward of one state that backward will come by.

    Attributes:
        state: the place of the state in the list of the iteration.
        began: autograd's sequence number when it began; the nodes that it made have this one and higher ones.
        leaving: weakly, the autograd node through which backward leaves it; None if no input of it needs a gradient.
    """

    state: int
    began: int
    leaving: weakref.ReferenceType[Any] | None

    def will_be_left(self) -> bool:
        """Whether the backward that runs now will call us when it leaves this pass."""
        node = None if self.leaving is None else self.leaving()
        return node is not None and runs_in_this_backward(node)


class Iteration:
    """What the states of one root share while an iteration runs.

    Attributes:
        context: the lanes and reductions in flight.
        is_last_backward: whether the end of backward waits for reductions and forgets the order of forward.
        prefetch_depth: how many groups are gathered ahead; None leaves it at the default.
        prefetch_budget: how many bytes of all groups may be unsharded at a time; None for a depth.
        post_optim_event: user's event that the next forward's first gather waits for.
        builds_graph: whether the backward that runs, or ran last, makes a graph of its own (`create_graph=True`).
    """

    def __init__(self, context: CommContext) -> None:
        self.context = context
        self.is_last_backward = True
        self.prefetch_depth: int | None = None
        self.prefetch_budget: int | None = None
        self.post_optim_event: Any = None
        self.forward_root: weakref.ReferenceType[FSDPState] | None = None
        self.innermost: FSDPState | None = None  # of the passes that run
        self._caller: FrameType | None = None  # of the forward that runs
        self._thread = 0
        self._states: list[weakref.ReferenceType[FSDPState]] = []
        self._learnt: list[int] = []
        self._is_steady = False  # the last two forwards ran in one order
        self._position = 0
        self._running: list[int] = []
        self._ran: list[Pass] = []
        self._ran_before = 0
        self._prefetched: dict[bool, list[FSDPParamGroup]] = {False: [], True: []}  # by whether for backward
        self._backward_queued = False
        self.builds_graph = False
        self.backwards = 0
        self._within: Budget | None = None
        # What a budget has worked out of `_learnt` and `_ran`, by whether for backward; None after they have changed.
        self._uses: dict[bool, GroupUses | None] = {False: None, True: None}
        self._ran_at_first = 0  # the length of `_ran` then

    # -- membership ----------------------------------------------------------------------------------------------------

    def set_states(self, states: Sequence[FSDPState]) -> None:
        """All states below the root, root first, in the order of `named_modules`."""
        self._states = [weakref.ref(state) for state in states]
        for index, state in enumerate(states):
            state.index = index

    @property
    def all_states(self) -> list[FSDPState]:
        """The states that are still alive (torch's pipelining reads this name)."""
        return [state for reference in self._states if (state := reference()) is not None]

    def _at(self, index: int) -> FSDPState | None:
        return self._states[index]()

    # -- forward -------------------------------------------------------------------------------------------------------

    def begin_forward(self, state: FSDPState) -> bool:
        """Called by each state that begins forward; True for the outermost one of this forward.

        Raises:
            RuntimeError: if a backward has begun and never ended, so that this iteration would mix with it; and if
                another thread runs a forward of the same root.
        """
        if self._backward_queued:
            if in_backward():  # activation checkpointing recomputes: end_backward sees to what end_forward would
                return False
            raise RuntimeError(
                f"forward of '{state.fqn}' begins, but the backward before it never ended (it raised?); call "
                "reset_iter_state() on the root module first, which drops the failed iteration's gradients"
            )
        if self.forward_root is not None and (root := self.forward_root()) is not None:
            if self._thread != threading.get_ident() and self._caller is not None and runs_elsewhere(self._caller):
                raise RuntimeError(
                    f"forward of '{state.fqn}' begins while that of '{root.fqn}' runs in another thread. Parameters "
                    "are gathered and freed for one forward at a time; run the forwards one after the other"
                )
            if state is not root and not state.is_root:
                return False
            if self._caller is None or is_on_stack(self._caller):  # it calls itself
                return False
            self._forget_forward(root)
        self.forward_root = weakref.ref(state)
        self.innermost = None
        self._caller = calling_frame()
        self._thread = threading.get_ident()
        self._position = 0
        self._running = []
        self._uses[False] = None
        self._ran_before = len(self._ran)
        self.context.slots = 1 if self.prefetch_budget is not None else self.depth + 1
        self.context.free_released()  # writes to a local shard since then are not always noticed
        if state.is_root:
            self._free_stale()
            self._settle_shards()
        if self.post_optim_event is not None:
            self.context.gathers.wait_event(self.post_optim_event)
            self.post_optim_event = None
        return True

    def _free_stale(self) -> None:
        """Frees what is older than an optimizer step, so that it is gathered again ahead of its use."""
        for state in self.all_states:
            for group in state.groups:
                if group.is_unsharded and group.is_stale and not group.in_use:
                    group.reshard()

    def _settle_shards(self) -> None:
        """Lets gathers of this iteration wait, once, for what has been queued before it: an optimizer step, a load."""
        gathers = self.context.gathers
        if gathers.has_streams:
            gathers.wait_event(gathers.current_event())
            for group in self._groups:
                group.settle_shards()

    def _forget_forward(self, root: FSDPState) -> None:
        """What the hooks after each forward would have done, which did not run for one that was interrupted."""
        for state in self.all_states:
            state.reset()
            for group in state.groups:
                group.forward_users = 0
        self.end_forward(root, failed=True)

    def is_forward_root(self, state: FSDPState) -> bool:
        """Whether `state` is the outermost one of the forward that runs."""
        return self.forward_root is not None and self.forward_root() is state

    def note_running(self, state: FSDPState) -> bool:
        """A state's forward begins: part of the order that this iteration teaches. False if it was not expected."""
        if self._backward_queued:
            return False
        self._running.append(state.index)
        try:  # found at once, where this iteration runs as the last one did
            self._position = self._learnt.index(state.index, self._position) + 1
        except ValueError:
            return False
        return True

    def entered(self, state: FSDPState) -> None:
        """A state's parameters are there and its forward begins: prefetch what the learnt order has next."""
        if self.note_running(state) and (self._is_steady or not self.context.gathers.has_streams):
            ahead = self._learnt[self._position : self._position + self.depth]
            self._prefetch(ahead, in_backward=False)

    def left(self, passed: Pass) -> None:
        """A state's forward has ended and backward will come by: in the reverse of this order."""
        if self._backward_queued and self._awaited(passed.state):  # recomputed
            return
        self._ran.append(passed)
        self._uses[True] = None
        del self._ran[:-_LONGEST]

    def _awaited(self, index: int) -> bool:
        return any(passed.state == index for passed in self._ran)

    @outside_transforms
    def end_forward(self, state: FSDPState, *, failed: bool) -> None:
        """The outermost forward has ended: learns its order, frees what was prefetched in vain.

        One that raised teaches nothing, and nothing of it stays unsharded.
        """
        self.forward_root = self._caller = self.innermost = None
        if failed:
            del self._ran[self._ran_before :]
            for one in self.all_states:
                one.to_sharded()
        elif state.is_root:
            self._is_steady = self._running == self._learnt
            if not self._is_steady:
                self._learnt = self._running
        self._running = []
        self._uses[False] = None
        self._free_unused(in_backward=False)
        self.context.free_released(but=1 if self._ran and torch.is_grad_enabled() else 0)
        if not failed:
            self.context.settle_gathers()

    # -- backward ------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Called by each state that begins backward; queues the end of backward once."""
        if not self._backward_queued:
            self._backward_queued = True
            self.builds_graph = torch.is_grad_enabled() and not transforms_active()
            queue_end_of_backward(self.end_backward)

    def entered_backward(self, state: FSDPState) -> None:
        """A state's backward begins: prefetch the states that ran before it in forward.

        Where nothing would tell us that backward leaves it, the next one begins at once: Note [Ready in order].
        """
        last = len(self._ran) - 1
        while last >= 0 and self._ran[last].state != state.index:
            last -= 1
        if last < 0:
            return
        entered = self._ran[last]
        del self._ran[last:]
        if state.backward_prefetch:
            listed = state.prefetch_for_backward()
            in_order = {passed.state for passed in self._ran[-len(listed) :]}
            for one in listed:
                if one.index not in in_order:
                    one.wait_for_unshard()  # nothing would be told before backward gets there
        else:
            ahead = self._ran[: -self.depth - 1 : -1] if self.depth else []
            self._prefetch([passed.state for passed in ahead], in_backward=True)
        if self._ran and (self._ran[-1].began >= entered.began or not entered.will_be_left()):
            self.left_backward()

    def left_backward(self) -> None:
        """Backward leaves a state, so it may go to the one that ran before it: the parameters of that must be there."""
        if self._ran and (state := self._at(self._ran[-1].state)) is not None:
            state.pre_backward()

    @outside_transforms
    def end_backward(self) -> None:
        """Reduces what no post-backward hook has seen, reshards, waits for reductions if this is the last backward."""
        self._backward_queued = False
        self.backwards += 1
        for state in reversed(self.all_states):
            state.end_backward()
        root = self.forward_root() if self.forward_root is not None else None
        if root is None or not root.in_forward:
            self.forward_root = self._caller = None
        if self.is_last_backward:
            self._ran.clear()
            self._uses[True] = None
            self._free_unused(in_backward=True)
            self.context.free_released()
            self.context.finish_reductions()
            self._wait_for_host_copies()
        self.context.settle_gathers()
        if events.hub.active:
            events.emit(events.BackwardEnded(self.is_last_backward))

    def _wait_for_host_copies(self) -> None:
        """Gradients on their way to pinned memory: the optimizer reads them on the host."""
        device = self.context.device
        if device.type == "cpu":
            return
        if any(param.pinned for state in self.all_states for group in state.groups for param in group.params):
            torch.get_device_module(device).current_stream().synchronize()

    # -- prefetch and recovery -----------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward of these states runs; forwards within it are recomputations."""
        return self._backward_queued

    @property
    def depth(self) -> int:
        """How many groups are gathered ahead, where no budget says so."""
        return DEFAULT_PREFETCH_DEPTH if self.prefetch_depth is None else self.prefetch_depth

    @property
    def _groups(self) -> list[FSDPParamGroup]:
        return list(dict.fromkeys(group for state in self.all_states for group in state.groups))

    def _upcoming(self) -> Iterator[tuple[FSDPParamGroup, bool]]:
        """What is going to be used, soonest first, and whether backward is what uses it."""
        in_forward = self.forward_root is not None and not self._backward_queued
        if in_forward:
            for index in itertools.islice(self._learnt, self._position, None):
                if (state := self._at(index)) is not None:
                    yield from ((group, False) for group in state.groups)
        yield from ((group, True) for group in self._awaited_by_backward())

    def _awaited_by_backward(self) -> Iterator[FSDPParamGroup]:
        """What backward is going to use, soonest first."""
        for passed in reversed(self._ran):
            if (state := self._at(passed.state)) is not None:
                yield from (group for group in state.groups if group.unshard_in_backward)

    @property
    def _budget(self) -> Budget | None:
        if self.prefetch_budget is None:
            return None
        if self._within is None or self._within.nbytes != self.prefetch_budget:
            self._within = Budget(self.prefetch_budget, self._groups)
        return self._within

    def _uses_in(self, *, backward: bool) -> tuple[GroupUses, int]:
        """What forward or backward is going to use, and the step from which on it still is."""
        uses = self._uses[backward]
        if uses is None:
            indices = [passed.state for passed in reversed(self._ran)] if backward else self._learnt
            states = map(self._at, indices)
            uses = self._uses[backward] = uses_of(
                [group for group in state.groups if group.unshard_in_backward or not backward] if state else []
                for state in states
            )
            self._ran_at_first = len(self._ran)
        return uses, self._ran_at_first - len(self._ran) if backward else self._position

    def make_room(self, groups: Sequence[FSDPParamGroup], *, in_backward: bool) -> None:
        """Before `groups` are gathered because they are used now: keeps to the budget, if there is one.

        Raises:
            ValueError: if the budget does not hold them beside what is in use.
        """
        if (within := self._budget) is not None:
            within.make_room(groups, self._upcoming, in_backward)

    def worth_keeping(self, groups: Sequence[FSDPParamGroup]) -> Sequence[FSDPParamGroup]:
        """Those of `groups` that are to stay unsharded until their next use, though forward has ended for them."""
        if (within := self._budget) is None:
            return ()
        in_forward = self.forward_root is not None and not self._backward_queued
        uses, step = self._uses_in(backward=False) if in_forward else (uses_of([]), 0)
        return within.worth_keeping(groups, self._upcoming, uses, step, self._awaited_by_backward)

    def prefetch_listed(self, groups: Sequence[FSDPParamGroup], *, in_backward: bool) -> None:
        """Gathers what the user's explicit list names: all of it, or what the budget has room for."""
        if (within := self._budget) is None:
            for group in groups:
                group.unshard(in_backward=in_backward)
            return
        listed = [(group, in_backward) for group in groups]

        def upcoming() -> Iterator[tuple[FSDPParamGroup, bool]]:
            yield from listed
            yield from ((group, backward) for group, backward in self._upcoming() if backward != in_backward)

        self._note_prefetched(within.prefetch(upcoming, in_backward), in_backward)

    def _note_prefetched(self, groups: Sequence[FSDPParamGroup], in_backward: bool) -> None:
        for group in groups:
            group.prefetched = True
            self._prefetched[in_backward].append(group)

    def _free_unused(self, *, in_backward: bool) -> None:
        """Frees what was prefetched in vain: for modules that were skipped, for a forward that was dropped.

        As the end of a forward would, where one has used it and backward comes by again.
        """
        for group in self._prefetched[in_backward]:
            if group.prefetched and not group.held_by_user:
                group.reshard(keep=not in_backward and any(self._awaited(user.index) for user in group.users))
        self._prefetched[in_backward].clear()

    def _prefetch(self, indices: Sequence[int], *, in_backward: bool) -> None:
        if (within := self._budget) is not None:
            uses, step = self._uses_in(backward=in_backward)
            self._note_prefetched(within.prefetch(self._upcoming, in_backward, uses, step), in_backward)
            return
        for index in indices:
            state = self._at(index)
            if state is None or state.is_root:
                continue
            if self.context.unsharded > self.depth:
                return
            for group in state.groups:
                if in_backward and not group.unshard_in_backward:
                    continue
                if not group.is_unsharded:
                    group.unshard(in_backward=in_backward)
                elif in_backward or not (group.forward_users and group.reshard_after_forward):
                    continue
                self._note_prefetched([group], in_backward)  # a tied or repeated module's own: it stays for the next

    def note_use(self, group: FSDPParamGroup) -> None:
        """Tells tools whether a group that is needed now had been prefetched, or was left where it is."""
        if events.hub.active:
            events.emit((events.PrefetchHit if group.has_memory else events.PrefetchMiss)(group.label))

    def reset(self) -> None:
        """Forgets an iteration that failed: nothing is in flight, all is sharded, unsharded gradients are dropped."""
        self.context.settle_after_failure()
        self.forward_root = self._caller = self.innermost = None
        self._backward_queued = False
        self._running, self._ran = [], []
        self._uses = {False: None, True: None}
        self._prefetched = {False: [], True: []}
        for state in self.all_states:
            for group in state.groups:
                group.abandon()
            state.reset()
