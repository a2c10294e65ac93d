"""The all-gather of a group: every rank's chunk of every item, written to where the unsharded tensors are."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardkit.core import events
from shardkit.core.runtime.buffers import note_allocated, note_freed
from shardkit.core.runtime.compressed.gather import compressed_gather, gather_rows
from shardkit.core.runtime.details import details
from shardkit.core.runtime.packing import as_dtype, strided
from shardkit.core.runtime.plan import GatherPlan
from shardkit.core.runtime.program import Program
from shardkit.core.runtime.shared.gather import shared_gather
from shardkit.core.runtime.transport.compressed import CompressedTransport
from shardkit.core.runtime.transport.shared import SharedTransport
from shardkit.core.runtime.transport.stand_in import StandIn
from shardkit.core.torch_compat import foreach_copy_


@torch.no_grad()
def gather(plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
    """The program that gathers `plan`'s items. Collective over the plan's group, in launch order.

    `sources[i]` is this rank's chunk, of shape `items[i].layout.local_shape(rank)`, of any dtype (cast when written)
    and on any device. `flats[i]` is a 1-D tensor of `items[i].dtype` on the group's device, allocated, of
    `padded_numel` elements if the item is cut on dim 0 and of `numel` if not. When the program is done,
    `flats[i][:numel].view(shape)` is the unsharded tensor; elements behind it are undefined.

    The packed buffer is allocated now, on the current stream. Raises `ValueError` when custom communication allocates
    a wrong one.
    """
    if plan.transport.world_size == 1:
        return copy_alone(sources, flats)
    if isinstance(plan.transport, SharedTransport):
        return shared_gather(plan, sources, flats)
    if isinstance(plan.transport, StandIn):
        return plan.transport.gather_program(plan, sources, flats)
    if isinstance(plan.transport, CompressedTransport):
        return compressed_gather(plan, sources, flats)
    packed = None
    if plan.packing is not None:
        packed = plan.transport.gather_buffer(plan.packing.numel, plan.packed_dtype, plan.label)
        note_allocated(packed, plan.label, "packed")
    return _gather(plan, sources, flats, packed)


def gather_buffer_bytes(plan: GatherPlan) -> int:
    """Bytes that a gather of `plan` takes beside the unsharded tensors while it is under way."""
    if isinstance(plan.transport, CompressedTransport):
        return gather_rows(plan).nbytes
    return 0 if plan.packing is None else plan.packing.numel * plan.packed_dtype.itemsize


@torch.no_grad()
def copy_alone(sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
    """The program of a single rank, whose chunk is the tensor: casts and moves it. `sources` and `flats` as above."""
    shaped = [flat[: source.numel()].view(source.shape) for source, flat in zip(sources, flats, strict=True)]
    foreach_copy_(shaped, list(sources), non_blocking=True)
    return
    yield  # a program, though nothing is waited for


@torch.no_grad()
def _gather(
    plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor], packed: torch.Tensor | None
) -> Program:
    launched = time.perf_counter()
    buffers = [flats[i] for i, _ in plan.direct]
    if packed is not None:
        buffers.append(packed)
    _write_own_chunks(plan, sources, flats, packed)
    if events.hub.active:
        events.emit(events.GatherStarted(*_described(plan), **details(plan)))
    try:
        if buffers:
            yield plan.collective.all_gather(buffers, plan.slots)
        if packed is not None:
            assert plan.packing is not None
            plan.packing.copy_out(packed, flats)
    finally:
        if packed is not None:
            note_freed(packed, plan.label, "packed")
    if events.hub.active:
        events.emit(events.GatherFinished(*_described(plan), time.perf_counter() - launched, **details(plan)))


def _described(plan: GatherPlan) -> tuple[str, tuple[str, ...], int, int, torch.dtype, dist.ProcessGroup]:
    return plan.label, plan.fqns, plan.nbytes, plan.wire_nbytes, plan.dtype, plan.transport.group


def _write_own_chunks(
    plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor], packed: torch.Tensor | None
) -> None:
    """Write this rank's chunks, cast, into its slots and into its row of the packed buffer."""
    targets = [_shaped(flats[i].narrow(0, start, numel), shape) for i, start, numel, shape in plan.own_slots]
    chunks = [sources[i] for i, _, _, _ in plan.own_slots]
    if packed is not None:
        for item, size, stride, at in plan.own_row:
            targets.append(strided(as_dtype(packed, plan.items[item].dtype), size, stride, at))
            chunks.append(sources[item])
    if targets:
        foreach_copy_(targets, chunks, non_blocking=True)


# A view costs a microsecond; a group has dozens of small chunks, most of them 1-D already.
def _shaped(chunk: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return chunk.view(shape) if len(shape) > 1 else chunk
