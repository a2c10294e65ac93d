"""What the groups of one root share: the lanes that communication runs on and the reductions that are in flight."""

from __future__ import annotations

import contextlib
from collections import deque

import torch

from shardkit.core.runtime.lanes import Program, Ticket, make_lane
from shardkit.core.runtime.transport import SharedTransport

__all__ = ["CommContext"]


class CommContext:
    """One lane for gathers, one for reductions. `share_comm_ctx` gives several roots the same one.

    `unsharded` counts the groups that hold unsharded memory which forward is to free; it bounds prefetching.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gathers = make_lane(device, "all-gather", priority=-1)
        self.reductions = make_lane(device, "reduce-scatter", priority=-1)
        self.unsharded = 0
        self._lent: list[tuple[Ticket, SharedTransport]] = []
        self._in_flight: deque[Ticket] = deque()

    def reduce(self, program: Program, label: str, max_inputs: int) -> None:
        """Starts a reduction after all but the newest `max_inputs - 1` earlier ones have let go of their inputs.

        So at most `max_inputs` groups' unsharded gradients are alive for communication, and what an earlier reduction
        has left to do after its reduce-scatter (the all-reduce of HSDP) overlaps with the backward that goes on.
        """
        for ticket in list(self._in_flight)[: max(0, len(self._in_flight) - max_inputs + 1)]:
            ticket.advance()
        self._in_flight.append(self.reductions.start(program, label))
        while self._in_flight and self._in_flight[0].done:
            self._in_flight.popleft()

    def lent(self, ticket: Ticket, transport: SharedTransport) -> None:
        """Remembers a gather in which peers read this rank's shards."""
        self._lent.append((ticket, transport))

    def settle_gathers(self) -> None:
        """Waits until no peer reads this rank's shards any more, so that they may be written to.

        Gathers that are still under way are waited for first: peers read a shard when they come to need it.

        For when control goes back to the user: the end of forward and of backward, an unshard of theirs. An optimizer
        that steps in backward is not among these: a gradient is only delivered once every peer has sent its part, which
        it computed from what it had read.
        """
        lent, self._lent = self._lent, []
        for ticket, _ in lent:
            ticket.wait()
        for transport in {transport for _, transport in lent}:
            transport.settle()

    def finish_reductions(self) -> None:
        """Waits for every reduction: afterwards the compute stream may use all sharded gradients."""
        while self._in_flight:
            self._in_flight.popleft().wait()

    def settle_after_failure(self) -> None:
        """After an iteration that failed: waits for what can still end, gives up on what cannot.

        Other roots may share this context, and their gradients are good. Peers that are slower may still read this
        rank's shards; those that failed, too, have let go of them or will not come.
        """
        while self._in_flight:
            _wait_or_abandon(self._in_flight.popleft())
        lent, self._lent = self._lent, []
        for ticket, _ in lent:
            _wait_or_abandon(ticket)
        for transport in {transport for _, transport in lent}:
            with contextlib.suppress(RuntimeError):
                transport.settle()


def _wait_or_abandon(ticket: Ticket) -> None:
    try:
        ticket.wait()
    except RuntimeError:
        ticket.abandon()
