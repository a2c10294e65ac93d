"""What the groups of one root share: lanes, memory that can be taken back or taken over, reductions in flight."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shardkit.core.runtime.lanes import Lane, Program, Ticket, make_lane
from shardkit.core.runtime.plan import Transport

__all__ = ["DEFAULT_PREFETCH_DEPTH", "CommContext", "MemoryOwner"]

DEFAULT_PREFETCH_DEPTH = 1

# Gathers whose shards, brought from the host, are on the device at a time: one is gathered, one arrives.
_MOST_STAGED = 2


class MemoryOwner(Protocol):
    """A parameter group, as far as its memory goes."""

    def free_memory(self) -> None:
        """Frees the unsharded memory, on the host; its readers' streams were waited for."""


class CommContext:
    """One lane for gathers, one for reductions. `share_comm_ctx` gives several roots the same one.

    Note [Released memory]: a group that is resharded when its forward or backward ends is *released*: its modules hold
    the sharded parameters, its memory stays and is still valid. A gather frees the memory that was released first when
    it would otherwise exceed `slots` groups; on streams it then waits for the events recorded at that release, and not
    for what computes now. A group that is used again before that (backward begins with what forward used last) takes
    its memory back without a gather. At the end of forward only the group that backward needs first stays released,
    and none at the end of backward.

    Attributes:
        slots: how many groups may hold unsharded memory that forward is to free: `prefetch_depth + 1`.
        unsharded: how many of them are in use or being gathered.
        finalization: whose reductions of a step, which a user has to wait for, are under way.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots = DEFAULT_PREFETCH_DEPTH + 1
        self.unsharded = 0
        self.finalization: object | None = None
        self._released: dict[weakref.ReferenceType[MemoryOwner], tuple[Any, ...]] = {}
        self._read_by_peers: list[tuple[Ticket, Transport]] = []
        self._staged: deque[tuple[Ticket, Sequence[torch.Tensor]]] = deque()
        self._in_flight: deque[Ticket] = deque()

    @functools.cached_property
    def gathers(self) -> Lane:
        """Runs gathers, and owns the memory of unsharded parameters: runtime/lanes.py, Note [Who owns memory]."""
        return make_lane(self.device, "all-gather", priority=-1)

    @functools.cached_property
    def transfers(self) -> Lane:
        """Brings shards from the host, and owns the memory that they arrive in."""
        return make_lane(self.device, "host-to-device", priority=-1)

    @functools.cached_property
    def reductions(self) -> Lane:
        """Runs reductions; owns no memory."""
        return make_lane(self.device, "reduce-scatter", priority=-1)

    # -- unsharded memory ----------------------------------------------------------------------------------------------

    def release(self, group: MemoryOwner, readers: tuple[Any, ...]) -> None:
        """Notes that `group` is not in use any more; its memory may be taken over after the events `readers`."""
        self._released[weakref.ref(group)] = readers

    def take_back(self, group: MemoryOwner) -> None:
        """The group uses its memory again, which is as it left it."""
        del self._released[weakref.ref(group)]

    def make_room(self) -> None:
        """Frees what was released first, so that one more group may be gathered."""
        self.free_released(but=max(0, self.slots - self.unsharded - 1))

    def free_released(self, *, but: int = 0) -> None:
        """Frees the memory of all released groups but the `but` that were released last."""
        while len(self._released) > but:
            self._free(next(iter(self._released)))

    def free(self, group: MemoryOwner) -> None:
        """Frees the memory of one released group."""
        self._free(weakref.ref(group))

    def _free(self, reference: weakref.ReferenceType[MemoryOwner]) -> None:
        readers, group = self._released.pop(reference), reference()
        for event in readers:
            self.gathers.wait_event(event)
        if group is not None:
            group.free_memory()

    def on_device(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`sources` on the device, in their own dtype; the gather lane waits for those that come from the host.

        Transfers overlap with the gather before. `note_staged` is called with the gather that reads them.
        """
        if self.device.type == "cpu" or all(source.device.type != "cpu" for source in sources):
            return list(sources)
        while len(self._staged) >= _MOST_STAGED:
            self.transfers.wait_event(self._staged.popleft()[0].finished)
        with self.transfers.owning_memory():
            staged = [source.to(self.device, non_blocking=True) for source in sources]
            self.gathers.wait_event(self.transfers.current_event())
        return staged

    def note_staged(self, ticket: Ticket, staged: Sequence[torch.Tensor]) -> None:
        """Keeps what `on_device` has brought until a later transfer may take its memory, after `ticket`."""
        if self.device.type != "cpu":
            self._staged.append((ticket, staged))

    def wait_for_writers(self) -> None:
        """Makes the gather lane wait for reductions under way: an optimizer may step on the shards as they end.

        What the current stream has queued is the caller's to wait for.
        """
        for ticket in self._in_flight:
            self.gathers.wait_event(ticket.finished)

    # -- communication in flight ---------------------------------------------------------------------------------------

    def reduce(self, program: Program, label: str, max_inputs: int) -> None:
        """Starts a reduction after all but the newest `max_inputs - 1` earlier ones have let go of their inputs.

        So at most `max_inputs` groups' unsharded gradients are alive for communication, and what an earlier reduction
        has left to do after its reduce-scatter (the all-reduce of HSDP) overlaps with the backward that goes on.
        """
        for ticket in list(self._in_flight)[: max(0, len(self._in_flight) - max_inputs + 1)]:
            ticket.wait_for_stage()
        self._in_flight.append(self.reductions.start(program, label))
        while self._in_flight and self._in_flight[0].done:
            self._in_flight.popleft()

    def note_read_by_peers(self, ticket: Ticket, transport: Transport) -> None:
        """Remembers a gather in which peers read this rank's shards."""
        self._read_by_peers.append((ticket, transport))

    def settle_gathers(self) -> None:
        """Waits until no peer reads this rank's shards any more, so that they may be written to.

        Gathers that are still under way are waited for first: peers read a shard when they come to need it.

        For when control goes back to the user: the end of forward and of backward, an unshard of theirs. An optimizer
        that steps in backward is not among these: a gradient is only delivered once every peer has sent its part, which
        it computed from what it had read.
        """
        gathers, self._read_by_peers = self._read_by_peers, []
        for ticket, _ in gathers:
            ticket.wait()
        for transport in {transport for _, transport in gathers}:
            transport.wait_until_read()

    def finish_reductions(self) -> None:
        """Waits for every reduction: afterwards the compute stream may use all sharded gradients."""
        while self._in_flight:
            self._in_flight.popleft().wait()

    def catch_up(self) -> None:
        """Runs what has been started to its end, so that no peer waits for this rank's part in it.

        For a collective outside of the schedule, which this rank may enter while a peer waits for what is under way.
        """
        if self.device.type != "cpu":  # streams go on by themselves
            return
        for ticket in (*(ticket for ticket, _ in self._read_by_peers), *self._in_flight):
            ticket.wait()

    def settle_after_failure(self) -> None:
        """After an iteration that failed: waits for what can still end, gives up on what cannot.

        Other roots may share this context, and their gradients are good. Peers that are slower may still read this
        rank's shards; those that failed, too, have let go of them or will not come.
        """
        while self._in_flight:
            _wait_or_abandon(self._in_flight.popleft())
        gathers, self._read_by_peers = self._read_by_peers, []
        for ticket, _ in gathers:
            _wait_or_abandon(ticket)
        for transport in {transport for _, transport in gathers}:
            with contextlib.suppress(RuntimeError):
                transport.wait_until_read()


def _wait_or_abandon(ticket: Ticket) -> None:
    try:
        ticket.wait()
    except RuntimeError:
        ticket.abandon()
