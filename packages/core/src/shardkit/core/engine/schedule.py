"""State shared by the states of one root: what runs, the order, passes yet to be visited, communication in flight.

Note [Prefetching]
Forward records the order in which states run, and the next one follows it: a state that begins has the gathers of the
next states started, so that they run while it computes. Backward follows the passes of this iteration's forward from
the last one on. How far ahead is a depth, a number of states, or as far as a budget of bytes has room. A user's
explicit lists take the place of the order.

A state that the order does not expect is gathered when it begins, and nothing is gathered ahead for it; the order that
this forward takes is the next one's. On streams gathers overlap with computation anyway, because the host runs ahead,
so forward follows an order only if two forwards had it in common: a wrong guess would cost link time.

Note [Who owns whom]
A module owns its state (through its hooks), and a state owns its groups and this object, which its groups own as well.
All references back are weak, so deleting a model frees its memory at once, without a garbage collection.

Note [Several forwards, one backward]
A pipeline runs the forwards of several micro-batches before the first backward, which visits the passes of the first
micro-batch only. The passes of the other forwards are set aside until this backward ends. Otherwise it would enter
them, leave none of them, and so gather all groups at once. Autograd says which nodes a backward will execute. A forward
is set aside if backward leaves none of its passes, although it could be seen leaving one. A backward may also run
inside a forward, as for a force or a penalty: passes of this forward are set aside one by one.

One backward may also visit several forwards (the sum of their losses). It may enter a pass through one that lies inside
it: a model returns the output of its last block. Then the passes around are entered with it. Each hook names its pass,
so their own hooks, which come later, drop no pass of another forward.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from shardkit.core.engine.order_check import OrderCheck
from shardkit.core.engine.room import Group, Room
from shardkit.core.engine.settings import Prefetch
from shardkit.core.runtime.lanes import Lane, Program, Ticket, make_lane
from shardkit.core.runtime.plan import Transport
from shardkit.core.runtime.storage import runs
from shardkit.core.torch_compat import (
    current_backward,
    in_backward,
    queue_end_of_backward,
    runs_in_this_backward,
    transforms_active,
)

State: TypeAlias = Any
"""An `FSDPState` (step.py), which imports this file."""


@dataclass(slots=True, eq=False)
class Pass:
    """A forward of one state, from the first of its modules to the last.

    Attributes:
        state: its index in the list of the schedule.
        began: autograd's sequence number when it began; its nodes have this number or higher ones.
        backward_parent: the pass in which it ran, with which backward continues.
        forward_parent: the same, but None where a recomputation begins.
        pending: ids of the modules of the state that have not run yet.
        is_open: whether it has begun and not ended.
        leaving: weakly, the autograd node through which backward leaves it; None if no input needs a gradient.
        has_backward: whether backward will visit it, because an output has a place in the graph.
        forward_number: of the outermost forward that it belongs to, from 1 on; 0 for a recomputation.
        number: its place among all passes, in the order in which they ended.
        visited: whether backward has entered it, or skipped it.
    """

    state: int
    began: int = 0
    backward_parent: Pass | None = None
    forward_parent: Pass | None = None
    pending: set[int] = field(default_factory=set)
    is_open: bool = False
    leaving: weakref.ReferenceType[Any] | None = None
    has_backward: bool = False
    forward_number: int = 0
    number: int = 0
    visited: bool = False


@dataclass(eq=False)
class Forward:
    """A forward that runs, of the outermost state, `root`, that it goes through.

    Attributes:
        number: its place among all forwards, from 1 on.
        states: indices of the states that have begun in it, in order.
        expected: place in the schedule's order of the next state that begins, if all goes as in the last forward.
        due: place there of the first state whose gather has not started.
        raised: whether it has raised an error; all else is left to the recovery.
    """

    root: weakref.ReferenceType[Any]
    number: int
    thread: int = field(default_factory=threading.get_ident)
    states: list[int] = field(default_factory=list)
    expected: int = 0
    due: int = 0
    raised: bool = False


@dataclass(eq=False)
class Backward:
    """A backward that runs. Forwards inside it are recomputations.

    Attributes:
        number: autograd's.
        builds_graph: whether it builds a graph (`create_graph=True`).
        due: number of passes, in the order of forward, whose gathers it has not started.
        set_aside: passes that another backward will visit.
        to_enter: number of states that it must enter, because it has left those that ran after them in forward.
    """

    number: int
    builds_graph: bool
    due: int
    set_aside: list[Pass]
    to_enter: int = 0


class CommContext:
    """The lanes for gathers, copies from the host, and reductions; `share_comm_ctx` makes several roots share one.

    Attributes:
        finalization: the owner of a step's reductions in flight that the user must wait for.
        in_flight: reductions that nobody has waited for.
        copies_to_pinned: whether they copy gradients to pinned memory, where only the host waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.finalization: object | None = None
        self.copies_to_pinned = False
        self._read_by_peers: list[tuple[Ticket, Transport]] = []
        self.in_flight: deque[Ticket] = deque()
        self._with_inputs: deque[Ticket] = deque()  # those of them that `wait_for_stage` has more to do for

    @functools.cached_property
    def gathers(self) -> Lane:
        """Runs gathers; owns the memory of unsharded parameters: runtime/lanes.py, Note [Who owns memory]."""
        return make_lane(self.device, "all-gather", priority=-1)

    @functools.cached_property
    def transfers(self) -> Lane:
        """Copies shards from the host; owns the memory that they arrive in."""
        return make_lane(self.device, "host-to-device", priority=-1)

    @functools.cached_property
    def reductions(self) -> Lane:
        """Runs reductions; owns the memory of their sums."""
        return make_lane(self.device, "reduce-scatter", priority=-1)

    # -- what a gather reads -------------------------------------------------------------------------------------------

    def on_device(
        self, sources: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], cast: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """`sources` on the device, those from the host in their dtypes; the gather lane waits for copies from the host.

        Shards that lie one after the other take one copy. `cast` has all of them so, in the dtype of the gather. Copies
        overlap with the previous gather, once it has read its own sources, whose memory is dropped when it is queued.
        """
        if self.device.type == "cpu" or all(source.device.type != "cpu" for source in sources):
            return list(sources)
        if self.gathers.sources_read is not None:
            self.transfers.wait_event(self.gathers.sources_read)
        # Shards on the device stay as they are: this stream does not wait for their writers.
        on_host = [place for place, source in enumerate(sources) if source.device.type == "cpu"]
        staged = list(sources)
        with self.transfers.owning_memory():
            for flat, places in runs(sources, on_host) if cast is None else [(cast, on_host)]:
                moved = flat.to(self.device, non_blocking=True)
                if len(wanted := {dtypes[place] for place in places}) == 1:  # at once, which frees the memory of a copy
                    moved = moved.to(wanted.pop())
                parts = moved.split([sources[place].numel() for place in places])
                for place, part in zip(places, parts, strict=True):
                    staged[place] = part.view(sources[place].shape).to(dtypes[place])
            self.gathers.wait_event(self.transfers.current_event())
        return staged

    def wait_for_writers(self) -> None:
        """Makes the gather lane wait for running reductions: an optimizer may step on the shards when they end.

        The caller must wait for work that the current stream has queued.
        """
        for ticket in self.in_flight:
            self.gathers.wait_event(ticket.finished)

    # -- communication in flight ---------------------------------------------------------------------------------------

    def reduce(self, make: Callable[[], Program], label: str, most_inputs: int) -> Ticket:
        """Starts the reduction whose program `make` makes, which allocates what it packs.

        Before that, waits until fewer than `most_inputs` earlier ones hold their inputs (gradients, or packed buffers).
        On streams the part of a reduction after its reduce-scatter (the all-reduce of HSDP) overlaps with the rest of
        backward; on a CPU a later call waits for it.
        """
        for ticket in list(itertools.islice(self._with_inputs, max(0, len(self._with_inputs) - most_inputs + 1))):
            ticket.wait_for_stage()
        while self._with_inputs and not self._with_inputs[0].has_stages:
            self._with_inputs.popleft()
        ticket = self.reductions.start(make(), label)
        self._with_inputs.append(ticket)
        self.in_flight.append(ticket)
        while self.in_flight and self.in_flight[0].done:
            self.in_flight.popleft()
        return ticket

    def note_read_by_peers(self, ticket: Ticket, transport: Transport) -> None:
        self._read_by_peers.append((ticket, transport))

    def wait_until_peers_have_read(self) -> None:
        """Waits for gathers in flight, then until no peer reads this rank's shards, so that they may be written.

        Called before control returns to the user. An optimizer that steps in backward needs no such call: a gradient is
        delivered after every peer has sent its part, which it computed from shards it had read.
        """
        gathers = self._read_by_peers.copy()
        self._read_by_peers.clear()
        try:
            for ticket, _ in gathers:
                ticket.wait()
            for transport in {transport for _, transport in gathers}:
                transport.wait_until_read()
        except BaseException:
            self._read_by_peers[:0] = gathers  # left to the recovery
            raise

    def finish_reductions(self) -> None:
        """Waits for all reductions; afterwards gradients may be read, including on the host if they are offloaded."""
        self._with_inputs.clear()
        while self.in_flight:
            ticket = self.in_flight.popleft()
            try:
                ticket.wait()
            except BaseException:
                if not ticket.done:  # left to the recovery
                    self.in_flight.appendleft(ticket)
                raise
        if self.copies_to_pinned:  # which the optimizer reads on the host
            torch.get_device_module(self.device).current_stream().synchronize()
            self.copies_to_pinned = False

    def catch_up(self) -> None:
        """Before a collective outside of the schedule: completes this rank's part in all that has been started."""
        if self.device.type != "cpu":  # streams progress without the host
            return
        for ticket in (*(ticket for ticket, _ in self._read_by_peers), *self.in_flight):
            ticket.wait()

    def end_or_abandon_all(self) -> None:
        """After a failed iteration: waits for operations that can still end, and gives up the others.

        Other roots may share this context, and their gradients are valid. Slower peers may still read this rank's
        shards; peers that failed as well have stopped reading or will not start.
        """
        self._with_inputs.clear()
        while self.in_flight:
            _wait_or_abandon(self.in_flight.popleft())
        gathers = self._read_by_peers.copy()
        self._read_by_peers.clear()
        for ticket, _ in gathers:
            _wait_or_abandon(ticket)
        for transport in {transport for _, transport in gathers}:
            with contextlib.suppress(RuntimeError):
                transport.wait_until_read()


def _wait_or_abandon(ticket: Ticket) -> None:
    try:
        ticket.wait()
    except Exception:  # noqa: BLE001 - a listener may raise any
        ticket.abandon()


class Schedule:
    """State shared by the states of one root.

    Attributes:
        order_check: None unless SHARDKIT_DEBUG=order.
        forward, backward: those that run, or have not ended because of an error.
        innermost: the innermost pass whose forward is running.
        order: indices of the states in the order of the last complete forward of the root: Note [Prefetching].
        is_steady: whether the one before it had the same order.
        passes: those that backward will visit, in the order in which they ended; not those that are set aside.
        is_last_backward: whether the end of backward waits for reductions on streams, and forgets the passes.
        manual_finalization: whether `finalize_backward` does that instead.
        unfinalized: whether a backward has begun that `finalize_backward` must end.
        post_optim_event: the user's event that the next forward's first gather waits for.
        backwards: number of backwards that have ended.
        states: those below the root by index, root first, in the order of `named_modules`.
    """

    def __init__(self, context: CommContext) -> None:
        self.context = context
        self.room = Room(Prefetch())
        self.order_check: OrderCheck | None = None
        self.forward: Forward | None = None
        self.backward: Backward | None = None
        self.innermost: Pass | None = None
        self.order: tuple[int, ...] = ()
        self.is_steady = False
        self.passes: list[Pass] = []
        self.is_last_backward = True
        self.manual_finalization = False
        self.unfinalized = False
        self.post_optim_event: Any = None
        self.backwards = 0
        self.states: list[weakref.ReferenceType[Any]] = []
        self.forward_numbers = itertools.count(1)
        self.pass_numbers = itertools.count(1)

    # -- states --------------------------------------------------------------------------------------------------------

    @property
    def all_states(self) -> list[State]:
        """The states that are still alive (torch's pipelining uses this name)."""
        return [state for reference in self.states if (state := reference()) is not None]

    @property
    def groups(self) -> list[Group]:
        return list(dict.fromkeys(group for state in self.all_states for group in state.groups))

    def set_prefetch(self, prefetch: Prefetch) -> None:
        self.room.clear()
        self.room = Room(prefetch)
        self.room.admit(self.groups)

    # -- what runs -----------------------------------------------------------------------------------------------------

    def unended(self, *, inside: bool) -> str | None:
        """Names a forward or a backward that raised, or was interrupted; None if there is none.

        Nothing may wait for a peer then, because it may never come. A forward that runs is no such thing if the caller
        may be `inside` it: torch calls no hook when Ctrl-C ends a forward, so one that runs looks the same.
        """
        root = None if self.forward is None else self.forward.root()
        if self.forward is not None and root is not None:
            if self.forward.raised:
                return f"the forward of '{root.fqn}' before it raised an error"
            if not inside:
                cause = "it was interrupted, runs in another thread, or calls itself"
                return f"the forward of '{root.fqn}' has not ended ({cause})"
        if self.backward is not None and not in_backward():  # autograd has dropped the end that was queued
            name = next((f", of '{state.fqn}'," for state in self.all_states), "")
            return f"the backward before it{name} never ended (it raised an error, or was interrupted)"
        return None

    def refuse_unended(self, what: str, *, inside: bool = False) -> None:
        """Raises RuntimeError if an iteration has not ended. `what` names the call that the user makes now."""
        if self.forward is None and self.backward is None:
            return
        unended = self.unended(inside=inside)
        if unended is not None:
            raise RuntimeError(
                f"{what}, but {unended}; call reset_iter_state() on the root module first, which drops the gradients "
                "of that iteration"
            )

    def refuse_in_backward(self, method: str) -> None:
        self.refuse_unended(f"{method} was called", inside=True)
        if in_backward():
            raise RuntimeError(f"{method} was called during a backward; call it after the backward has ended")
        self.refuse_during_finalization(f"{method} was called")

    def refuse_during_finalization(self, what: str) -> None:
        if self.context.finalization is not None:
            raise RuntimeError(
                f"{what}, but the gradients of an earlier finalize_backward(async_op=True), of this root or of one "
                "that shares its communication context, have not been waited for; call wait() on its handle first"
            )

    def set_manual_finalization(self, enabled: bool) -> None:
        """Selects whether `finalize_backward` or the last backward ends a step, before it has begun."""
        if enabled != self.manual_finalization and (in_backward() or self.unfinalized):
            raise RuntimeError(
                f"set_manual_backward_finalization({enabled}) was called "
                + ("during a backward" if in_backward() else "between a backward and its finalize_backward()")
                + "; call it before the first forward of a step"
            )
        self.manual_finalization = enabled

    # -- the passes that backward will visit ---------------------------------------------------------------------------

    def begin_backward(self, of: Pass | None, end: Callable[[], None]) -> None:
        """Sets aside the passes that this backward will not visit: Note [Several forwards, one backward].

        `of` is the pass whose output has called us, if it was one. Autograd will call `end`.
        """
        self.refuse_unended("a backward begins", inside=True)
        elsewhere = {one.forward_number for one in self.passes if one.leaving is not None and one.forward_number}
        if of is not None:
            elsewhere.discard(of.forward_number)
        for one in reversed(self.passes):
            if one.forward_number in elsewhere and self.will_be_left(one):
                elsewhere.discard(one.forward_number)
        aside = {id(one) for one in self.passes if one.forward_number in elsewhere}
        if self.forward is not None:
            aside |= self._before_inner_backward(self.forward, of)
        set_aside = [one for one in self.passes if id(one) in aside]
        self.passes = [one for one in self.passes if id(one) not in aside]
        builds_graph = torch.is_grad_enabled() and not transforms_active()
        self.backward = Backward(current_backward(), builds_graph, len(self.passes), set_aside)
        self.unfinalized = self.manual_finalization
        queue_end_of_backward(end)

    def _before_inner_backward(self, forward: Forward, of: Pass | None) -> set[int]:
        """Identities of the passes of the running forward that a backward inside it will not visit.

        A pass whose leaving autograd does not know, because its inputs need no gradient, counts as the later ones do.
        """
        undecided, skipped = [], set[int]()
        for one in self.passes:
            if one.forward_number != forward.number or one is of or self.will_be_left(one):
                continue
            undecided.append(id(one))
            if one.leaving is not None:
                skipped.update(undecided)
                undecided.clear()
        return skipped

    def will_be_left(self, one: Pass) -> bool:
        """Whether a hook of ours will run when the running backward leaves this pass."""
        node = None if one.leaving is None else one.leaving()
        if node is None:  # its graph is gone, or no input needs a gradient
            return False
        if one.forward_number and self.backward is not None and current_backward() != self.backward.number:
            return True  # asked in the inner backward of a recomputation, which knows only its own nodes
        return runs_in_this_backward(node)

    def forget_passes(self, entered: Pass | None = None) -> bool:
        """Forgets all passes, or one that backward enters, and later ones: no backward will visit them.

        False if backward has entered it before, or it is not known.
        """
        first = 0
        if entered is not None:
            first = -1 if entered.visited else len(self.passes) - 1
            while first >= 0 and self.passes[first] is not entered:
                first -= 1
            if first < 0:
                return False
        for one in self.passes[first:]:
            one.visited = True
        del self.passes[first:]
        return True


class Finalization:
    """Reductions that `finalize_backward` has started; its context holds it until they have been waited for."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        schedule.context.finalization = self

    def wait(self) -> None:
        """Waits for the reductions."""
        context = self.schedule.context
        if context.finalization is not self:
            raise RuntimeError(
                "reset_iter_state() has dropped the gradients that this handle is for; run the iteration again"
            )
        context.finish_reductions()
        context.wait_until_peers_have_read()
        context.finalization = None
