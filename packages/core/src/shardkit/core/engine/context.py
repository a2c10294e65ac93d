"""State that the groups of one root share: lanes, and communication in flight."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence

import torch

from shardkit.core.runtime.lanes import Lane, Program, Ticket, make_lane
from shardkit.core.runtime.plan import Transport
from shardkit.core.runtime.storage import runs


class CommContext:
    """The lanes for gathers, copies from the host, and reductions.

    `share_comm_ctx` makes several roots share one context.

    Attributes:
        finalization: the owner of a step's reductions in flight that the user must wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.finalization: object | None = None
        self._read_by_peers: list[tuple[Ticket, Transport]] = []
        self._in_flight: deque[Ticket] = deque()
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

        Shards that lie one after the other take one copy. `cast` has all of them so, in the dtype of the gather.

        Copies overlap with the previous gather: they wait until it has read its own sources, whose memory is dropped
        when it is queued.
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
        for ticket in self._in_flight:
            self.gathers.wait_event(ticket.finished)

    # -- communication in flight ---------------------------------------------------------------------------------------

    def reduce(self, make: Callable[[], Program], label: str, most_inputs: int) -> Ticket:
        """Starts the reduction whose program `make` makes, which allocates what it packs.

        Waits before until so many earlier ones have freed their inputs (gradients, or packed buffers) that this one is
        one of `most_inputs`. On streams the part of a reduction after its reduce-scatter (the all-reduce of HSDP)
        overlaps with the rest of backward; on a CPU a later call waits for it.
        """
        for ticket in list(itertools.islice(self._with_inputs, max(0, len(self._with_inputs) - most_inputs + 1))):
            ticket.wait_for_stage()
        while self._with_inputs and not self._with_inputs[0].has_stages:
            self._with_inputs.popleft()
        ticket = self.reductions.start(make(), label)
        self._with_inputs.append(ticket)
        self._in_flight.append(ticket)
        while self._in_flight and self._in_flight[0].done:
            self._in_flight.popleft()
        return ticket

    @property
    def is_reducing(self) -> bool:
        """Whether reductions are in flight that nobody has waited for."""
        return bool(self._in_flight)

    def note_read_by_peers(self, ticket: Ticket, transport: Transport) -> None:
        """Remembers a gather in which peers read this rank's shards."""
        self._read_by_peers.append((ticket, transport))

    def wait_until_peers_have_read(self) -> None:
        """Waits until no peer reads this rank's shards any more, so that they may be written.

        Waits first for gathers in flight, because peers read a shard only when they need it.

        Call it before control returns to the user: at the end of forward and of backward, and of the user's own
        unshard. An optimizer that steps in backward needs no such call: a gradient is delivered only after every peer
        has sent its part, which it computed from shards it had read.
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
        """Waits for every reduction; afterwards the compute stream may use all sharded gradients."""
        self._with_inputs.clear()
        while self._in_flight:
            ticket = self._in_flight.popleft()
            try:
                ticket.wait()
            except BaseException:
                if not ticket.done:  # left to the recovery
                    self._in_flight.appendleft(ticket)
                raise

    def catch_up(self) -> None:
        """Completes everything that has been started, so that no peer waits for this rank's part in it.

        For a collective outside of the schedule, which this rank may enter while a peer waits for earlier operations.
        """
        if self.device.type != "cpu":  # streams progress without the host
            return
        for ticket in (*(ticket for ticket, _ in self._read_by_peers), *self._in_flight):
            ticket.wait()

    def end_or_abandon_all(self) -> None:
        """After a failed iteration: waits for operations that can still end, and gives up the others.

        Other roots may share this context, and their gradients are valid. Slower peers may still read this rank's
        shards; peers that failed as well have stopped reading or will not start.
        """
        self._with_inputs.clear()
        while self._in_flight:
            _wait_or_abandon(self._in_flight.popleft())
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
