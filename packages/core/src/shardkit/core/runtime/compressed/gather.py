"""The compressed all-gather: every rank's chunks travel as one row of bytes and are unpacked where they belong.

This rank's own chunk takes the same way through the wire format, so that all ranks compute with the same parameters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from shardkit.core import events
from shardkit.core.runtime.buffers import note_allocated, note_freed
from shardkit.core.runtime.compressed.rows import chunks_of, format_of, rows_of
from shardkit.core.runtime.details import details
from shardkit.core.runtime.packing import strided
from shardkit.core.runtime.plan import GatherPlan
from shardkit.core.runtime.program import Program, hold
from shardkit.core.runtime.slots import Slots
from shardkit.core.runtime.transport.compressed import CompressedTransport

__all__ = ["GatherRows", "compressed_gather", "gather_rows"]


class GatherRows:
    """A plan's rows, by runs of ranks, this rank's own, and the slots of the buffer that holds them all."""

    def __init__(self, plan: GatherPlan, transport: CompressedTransport) -> None:
        policy = transport.policy
        layouts = [item.layout for item in plan.items]
        self.formats = [format_of(policy.gather, policy.block, item.layout, item.dtype) for item in plan.items]
        self.runs = rows_of(layouts, self.formats)
        widest = max(run.row.nbytes for run in self.runs)
        self.slots = Slots(tuple((run.ranks, widest if transport.padded_rows else run.row.nbytes) for run in self.runs))
        (self.own,) = (run.row for run in self.runs if run.first <= plan.rank < run.first + run.ranks)
        self.nbytes = self.slots.numel
        self.wire_nbytes = self.slots.slot_numel(plan.rank) * (transport.world_size - 1)


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
    for item, start, nbytes, _ in rows.own.chunks:
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
    for run in rows.runs:
        room = rows.slots.slot_numel(run.first)
        for item, start, nbytes, numel in run.row.chunks:
            layout, flat, form = plan.items[item].layout, flats[item], rows.formats[item]
            whole = flat[: layout.numel].view(layout.shape)
            for first, ranks in run.batches(numel):
                wire = strided(buffer, (ranks, nbytes), (room, 1), rows.slots.start(first) + start)
                places = chunks_of(whole, layout, first, ranks)
                if layout.dim == 0:  # the chunks are dense where they belong
                    form.read(wire, places.view(ranks, numel))
                    continue
                chunks = flat.new_empty(ranks, numel)
                form.read(wire, chunks)
                places.copy_(chunks.view(places.shape))
