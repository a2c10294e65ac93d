"""One object per root: coordination between the hooks of states: order, prefetching, end of backward, recovery.

`order.py` records the order in which states run, `timetable.py` follows it, and `room.py` decides whether there is room
to gather ahead.

Note [Who owns whom]
A module owns its state (through its hooks), and a state owns its groups and this object. All references back are weak,
so deleting a model frees its memory at once, without a garbage collection.

Note [Ready in order]
A block may keep a tensor on its module (`self.aux = ...`) that its caller adds to the loss. Backward then enters the
block through a tensor without a hook of ours, and must find its parameters gathered. Autograd runs the nodes of one
device in the reverse of the order in which forward made them. So a state's parameters are waited for before backward
can reach any node of its forward: when backward leaves the state that ran next in forward (`leave_backward`), or, if no
hook reports that, as soon as backward enters that state (`enter_backward`). No hook reports it if the state is nested
in the other one, or if the other's inputs need no gradient. So whatever order a backward takes, autograd never finds
parameters half-filled by a gather in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shardkit.core import events
from shardkit.core.engine.context import CommContext
from shardkit.core.engine.group import FSDPParamGroup
from shardkit.core.engine.order import Order, Pass, ScheduledState
from shardkit.core.engine.room import Room
from shardkit.core.engine.timetable import Prefetch, Timetable
from shardkit.core.torch_compat import (
    has_gradient_hooks,
    in_backward,
    outside_transforms,
    queue_end_of_backward,
    transforms_active,
)

__all__ = ["Finalization", "RootedState", "Schedule"]


class Schedule:
    """State shared by the states of one root during an iteration.

    Attributes:
        context: the lanes, and reductions in flight.
        order: the recorded order of the states, and the iteration's position in it.
        room: how much unsharded memory the groups may take.
        innermost: the innermost pass whose forward is running.
        is_last_backward: whether the end of backward waits for reductions on streams, and forgets the order of forward.
        manual_finalization: whether `finalize_backward` does that instead.
        post_optim_event: the user's event that the next forward's first gather waits for.
        builds_graph: whether the current or last backward builds a graph (`create_graph=True`).
        backwards: number of backwards that have ended.
    """

    def __init__(self, context: CommContext) -> None:
        self.context = context
        self.order = Order()
        self.innermost: Pass | None = None
        self.is_last_backward = True
        self.manual_finalization = False
        self.post_optim_event: Any = None
        self.builds_graph = False
        self.backwards = 0
        self._prefetch = Prefetch()
        self.room = Room(self._prefetch)
        self._thread = 0  # of the running forward
        self._raised = False  # that forward
        self._leaving = 0  # states that backward has left, whose predecessors have yet to begin
        self._unfinalized = False  # a backward has begun that `finalize_backward` must end

    def set_states(self, states: Sequence[ScheduledState]) -> None:
        """All states below the root, root first, in the order of `named_modules`."""
        self.order.set_states(states)
        self.room.admit(self.order.groups)

    @property
    def all_states(self) -> list[ScheduledState]:
        """The states that are still alive (torch's pipelining uses this name)."""
        return self.order.states

    @property
    def prefetch(self) -> Prefetch:
        """The user's setting of how far ahead groups are gathered."""
        return self._prefetch

    @prefetch.setter
    def prefetch(self, prefetch: Prefetch) -> None:
        self.room.clear()
        self._prefetch, self.room = prefetch, Room(prefetch)
        self.room.admit(self.order.groups)

    # -- forward -------------------------------------------------------------------------------------------------------

    def begin_forward(self, state: ScheduledState) -> bool:
        """Called by each state that begins forward; returns True for the outermost one.

        Raises:
            RuntimeError: if a forward or a backward before it has not ended, so that this iteration would mix with it.
        """
        order = self.order
        self._refuse_during_finalization(f"forward of '{state.fqn}' begins")
        if order.in_backward and in_backward():  # a recomputation: end_backward does the work of end_forward
            return False
        root = order.running_forward
        # torch calls no hook when Ctrl-C ends a forward. So a root's forward inside itself is taken for one after that.
        inside = root is not None and (state.runs_method or not (state is root or state.is_root))
        self.refuse_unended(f"forward of '{state.fqn}' begins", inside=inside and self._thread == threading.get_ident())
        if root is not None:
            return False
        self.room.free_released()  # later writes to a local shard are not always noticed
        self.room.recount()
        for group in order.groups if state.is_root else state.groups_below:
            group.sweep()
        order.begin_forward(state)
        self.innermost = None
        self._thread = threading.get_ident()
        if state.is_root:
            self._order_after_writes()
        if self.post_optim_event is not None:
            self.context.gathers.wait_event(self.post_optim_event)
            self.post_optim_event = None
        return True

    def unended(self, *, inside: bool) -> str | None:
        """Names a forward or a backward that raised, or was interrupted; None if there is none.

        Nothing may wait for a peer then, because it may never come. A forward that runs is no such thing if the caller
        may be `inside` it: torch calls no hook when Ctrl-C ends a forward, so one that runs looks the same.
        """
        root = self.order.running_forward
        if root is not None and self._raised:
            return f"the forward of '{root.fqn}' before it raised an error"
        if root is not None and not inside:
            return f"the forward of '{root.fqn}' has not ended (it was interrupted, or runs in another thread)"
        if self.order.in_backward and not in_backward():
            return "the backward before it never ended (it raised an error, or was interrupted)"
        return None

    def refuse_unended(self, what: str, *, inside: bool = False) -> None:
        """Raises RuntimeError if an iteration has not ended. `what` names the call that the user makes now."""
        unended = self.unended(inside=inside)
        if unended is not None:
            raise RuntimeError(
                f"{what}, but {unended}; call reset_iter_state() on the root module first, which drops the gradients "
                "of that iteration"
            )

    def _order_after_writes(self) -> None:
        """Makes gathers of this iteration wait, once, for work queued before it: an optimizer step, a load."""
        gathers = self.context.gathers
        if gathers.has_streams:
            gathers.wait_event(gathers.current_event())
            groups = self.order.groups
            if self.context.is_reducing and any(
                has_gradient_hooks(one.sharded_param) for group in groups for one in group.params
            ):
                self.context.wait_for_writers()  # hooks of gradients step on the shards when a reduction ends
            for group in groups:
                group.note_ordered()

    def is_forward_root(self, state: ScheduledState) -> bool:
        """Whether `state` is the outermost one of the running forward."""
        return self.order.running_forward is state

    def enter_forward(self, state: ScheduledState, listed: Sequence[FSDPParamGroup] | None) -> None:
        """Call when a state's parameters are gathered and its forward begins: gathers the next groups.

        `listed` are the groups that the user has listed for that, if any.
        """
        expected = self.order.record(state)
        if listed is not None:
            self.gather_listed(listed, in_backward=False)
        elif expected and (self.order.is_steady or not self.context.gathers.has_streams):
            self._gather_ahead(self.order.forward, in_backward=False)

    def note_raised(self) -> None:
        """The outermost forward has raised: all else is left to `reset`, because it may have to wait for peers."""
        self._raised = True

    @outside_transforms
    def end_forward(self, state: ScheduledState) -> None:
        """The outermost forward has ended: learns its order, and frees groups that were prefetched but not used."""
        self.innermost = None
        self.order.end_forward(complete=bool(state.is_root))
        self.room.free_unused(in_backward=False)
        self.room.free_released(but_for_backward=bool(self.order.passes) and torch.is_grad_enabled())
        self.context.settle_gathers()

    # -- backward ------------------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward of these states is running; forwards within it are recomputations."""
        return self.order.in_backward

    def begin_backward(self, of: Pass | None = None) -> None:
        """Called by each state that begins backward; queues the end of backward once."""
        if not self.order.in_backward:
            self.refuse_unended("a backward begins", inside=True)
            self.order.begin_backward(of)
            self._unfinalized = self.manual_finalization
            self.builds_graph = torch.is_grad_enabled() and not transforms_active()
            queue_end_of_backward(self.end_backward)

    def enter_backward(self, state: ScheduledState, entered: Pass) -> None:
        """Backward enters a pass of `state`: gathers the groups that ran before it in forward.

        If no hook reports that backward leaves it, the next state begins at once: Note [Ready in order].
        """
        if not self.order.enter_backward(entered):
            return
        passes = self.order.passes
        if state.backward_prefetch:
            listed = state.prefetch_for_backward()
            in_order = {one.state for one in passes[-len(listed) :]}
            for one in listed:
                if one.index not in in_order:
                    one.wait_for_unshard()  # no hook reports when backward gets there
        else:
            self._gather_ahead(self.order.backward, in_backward=True)
        if passes and (passes[-1].began >= entered.began or not self.order.will_be_left(entered)):
            self.leave_backward()

    def leave_backward(self) -> None:
        """Backward leaves a state, so it may enter the one that ran before, whose parameters must be gathered.

        A loop, because no hook may report that backward leaves that one either, and there may be thousands: a model
        with many inputs that need no gradient, or forwards whose outputs nobody has used.
        """
        self._leaving += 1
        if self._leaving > 1:  # called by a state that the loop below enters
            return
        try:
            while self._leaving and self.order.passes:
                following = self.order.passes[-1]
                state = self.order.state_at(following.state)
                if state is None:
                    break
                state.pre_backward(of=following)
                self._leaving -= 1
        finally:
            self._leaving = 0

    def end_backward(self) -> None:
        """Reduces gradients that no post-backward hook has seen, reshards, and after the last backward waits.

        An error here is one of the backward: it has not ended.
        """
        try:
            self._end_backward()
        except BaseException:
            self.order.in_backward = True
            raise

    @outside_transforms
    def _end_backward(self) -> None:
        order = self.order
        order.end_backward()
        self.backwards += 1
        for state in reversed(self.all_states):
            state.end_backward()
        self.room.free_unused(in_backward=True)
        is_last = self.is_last_backward and not self.manual_finalization
        if is_last:
            if order.running_forward is None:  # else it ran within a forward, whose passes others will visit
                order.forget_passes()
            self.room.free_released()
        if is_last or not self.context.reductions.has_streams:
            # On a CPU the last reductions go on only if somebody waits: their gradients would come after `zero_grad()`.
            self.finish_reductions()
        self.context.settle_gathers()
        if events.hub.active:
            events.emit(events.BackwardEnded(is_last))

    def finish_reductions(self) -> None:
        """Waits for all reductions; afterwards gradients may be read, including on the host if they are offloaded."""
        self.context.finish_reductions()
        self._wait_for_host_copies()

    def set_manual_finalization(self, enabled: bool) -> None:
        """Selects whether `finalize_backward` or the last backward ends a step.

        Raises:
            RuntimeError: if the current step was begun in the other mode.
        """
        if enabled != self.manual_finalization and (in_backward() or self._unfinalized):
            raise RuntimeError(
                f"set_manual_backward_finalization({enabled}) was called "
                + ("during a backward" if in_backward() else "between a backward and its finalize_backward()")
                + "; call it before the first forward of a step"
            )
        self.manual_finalization = enabled

    @outside_transforms
    def finalize_backward(self) -> Finalization:
        """Reduces waiting gradients and reshards, as configured; gradients are available after a wait."""
        if not (self.manual_finalization or self._unfinalized):
            raise RuntimeError(
                "finalize_backward was called while the end of the last backward finalizes by itself; call "
                "set_manual_backward_finalization(True) before the forward"
            )
        self.refuse_in_backward("finalize_backward")
        for state in reversed(self.all_states):
            for group in reversed(state.groups):
                group.finalize_backward()
        self._unfinalized = False
        self.order.forget_passes()
        self.room.free_released()
        return Finalization(self)

    def refuse_in_backward(self, method: str) -> None:
        """Raises RuntimeError if gradients are being computed or reduced, or an iteration has not ended."""
        self.refuse_unended(f"{method} was called", inside=True)
        if in_backward():
            raise RuntimeError(f"{method} was called during a backward; call it after the backward has ended")
        self._refuse_during_finalization(f"{method} was called")

    def _refuse_during_finalization(self, what: str) -> None:
        if self.context.finalization is not None:
            raise RuntimeError(
                f"{what}, but the gradients of an earlier finalize_backward(async_op=True), of this root or of one "
                "that shares its communication context, have not been waited for; call wait() on its handle first"
            )

    def _wait_for_host_copies(self) -> None:
        """Waits for gradients on the way to pinned memory, because the optimizer reads them on the host."""
        device = self.context.device
        if device.type == "cpu":
            return
        if any(param.pinned for group in self.order.groups for param in group.params):
            torch.get_device_module(device).current_stream().synchronize()

    # -- gathers ahead of use ------------------------------------------------------------------------------------------

    def _gather_ahead(self, timetable: Timetable, *, in_backward: bool) -> None:
        """Starts the gathers that are due, as far as there is room."""
        for index in timetable.due(self.room.states_ahead):
            state = self.order.state_at(index)
            for group in () if state is None else state.groups:
                if in_backward and not group.settings.unshard_in_backward:
                    continue
                if not self.room.gather_ahead(group, in_backward=in_backward):
                    return

    def gather_listed(self, listed: Sequence[FSDPParamGroup], *, in_backward: bool) -> None:
        """Gathers the groups in the user's explicit list: all of them, or as many as a budget has room for."""
        for group in listed:
            if self._prefetch.budget is None or group.room is not self.room:
                group.unshard(in_backward=in_backward)
            elif not self.room.gather_ahead(group, in_backward=in_backward):
                return

    # -- recovery ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets a failed iteration: nothing is in flight, everything is sharded, unsharded gradients are dropped."""
        finalization = self.context.finalization
        if isinstance(finalization, Finalization) and not finalization.belongs_to(self):
            self._refuse_during_finalization("reset_iter_state was called")
        self.context.finalization = None
        self._unfinalized = self._raised = False
        self.context.settle_after_failure()
        self.innermost = None
        self.order.reset()
        for state in self.all_states:
            for group in state.groups:
                group.abandon()
            state.reset()
        self.room.clear()


class Finalization:
    """Reductions that `finalize_backward` has started; its context holds it until they have been waited for."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        schedule.context.finalization = self

    def belongs_to(self, schedule: Schedule) -> bool:
        """Whether it has finalized a step of that root."""
        return self._schedule is schedule

    def wait(self) -> None:
        """Waits for the reductions.

        Raises:
            RuntimeError: if `reset_iter_state` was called meanwhile.
        """
        context = self._schedule.context
        if context.finalization is not self:
            raise RuntimeError(
                "reset_iter_state() has dropped the gradients that this handle is for; run the iteration again"
            )
        self._schedule.finish_reductions()
        context.settle_gathers()
        context.finalization = None


class RootedState(ScheduledState, Protocol):
    """A state that has a schedule, or will get that of its root."""

    schedule: Schedule
