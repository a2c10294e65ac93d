"""The compressed all-gather: every rank's chunks travel as one row of bytes and are unpacked where they belong.

This rank's own chunk takes the same way through the wire format, so that all ranks compute with the same parameters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from shardkit.core import events
from shardkit.core.runtime.buffers import note_allocated, note_freed
from shardkit.core.runtime.compressed.rows import format_of, rows_of
from shardkit.core.runtime.details import details
from shardkit.core.runtime.plan import GatherPlan
from shardkit.core.runtime.program import Program, hold
from shardkit.core.runtime.slots import Slots
from shardkit.core.runtime.transport.compressed import CompressedTransport

__all__ = ["GatherRows", "compressed_gather", "gather_rows"]


class GatherRows:
    """A plan's rows, one for each rank, and the slots of the buffer that holds them all."""

    def __init__(self, plan: GatherPlan, transport: CompressedTransport) -> None:
        policy, world = transport.policy, transport.world_size
        layouts = [item.layout for item in plan.items]
        self.formats = [format_of(policy.gather, policy.block, item.layout, item.dtype) for item in plan.items]
        self.rows = rows_of(layouts, self.formats, world)
        widest = max(row.nbytes for row in self.rows)
        self.slots = Slots(tuple((1, widest if transport.padded_rows else row.nbytes) for row in self.rows))
        self.nbytes = self.slots.numel
        self.wire_nbytes = self.slots.slot_numel(plan.rank) * (world - 1)


def gather_rows(plan: GatherPlan) -> GatherRows:
    """The rows of a plan whose transport compresses, made once."""
    transport = plan.transport
    assert isinstance(transport, CompressedTransport)
    rows = transport.gathers.get(plan)
    if rows is None:
        rows = transport.gathers[plan] = GatherRows(plan, transport)
    return rows


@torch.no_grad()
def compressed_gather(plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
    """The program that gathers `plan`'s items, as `runtime.gather.gather` says, but for the rounding."""
    rows = gather_rows(plan)
    buffer = plan.transport.gather_buffer(rows.nbytes, torch.uint8, plan.label)
    note_allocated(buffer, plan.label, "packed")
    return _gather(plan, rows, sources, flats, buffer)


@torch.no_grad()
def _gather(
    plan: GatherPlan,
    rows: GatherRows,
    sources: Sequence[torch.Tensor],
    flats: Sequence[torch.Tensor],
    buffer: torch.Tensor,
) -> Program:
    launched = time.perf_counter()
    transport = plan.transport
    assert isinstance(transport, CompressedTransport)
    hold(buffer)
    own = buffer[rows.slots.start(plan.rank) :]
    for item, start, nbytes, _ in rows.rows[plan.rank].chunks:
        rows.formats[item].write(sources[item].to(buffer.device).reshape(-1), own[start : start + nbytes])
    described = (plan.label, plan.fqns, plan.nbytes, rows.wire_nbytes, torch.uint8, transport.group)
    if events.hub.active:
        events.emit(events.GatherStarted(*described, **details(plan)))
    try:
        if rows.nbytes:
            yield transport.share(buffer, rows.slots)
        _unpack(plan, rows, flats, buffer)
    finally:
        note_freed(buffer, plan.label, "packed")
    if events.hub.active:
        events.emit(events.GatherFinished(*described, time.perf_counter() - launched, **details(plan)))


def _unpack(plan: GatherPlan, rows: GatherRows, flats: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    for rank, (row, sent) in enumerate(zip(rows.rows, buffer.split_with_sizes(rows.slots.sizes()), strict=True)):
        for item, start, nbytes, numel in row.chunks:
            layout, flat = plan.items[item].layout, flats[item]
            wire = sent[start : start + nbytes]
            if layout.dim == 0:  # the chunk is dense where it belongs
                rows.formats[item].read(wire, flat.narrow(0, rank * layout.padded_local_numel, numel))
                continue
            chunk = flat.new_empty(numel)
            rows.formats[item].read(wire, chunk)
            whole = flat[: layout.numel].view(layout.shape)
            place = whole.narrow(layout.dim, layout.offset(rank), layout.length(rank))
            place.copy_(chunk.view(layout.local_shape(rank)))
