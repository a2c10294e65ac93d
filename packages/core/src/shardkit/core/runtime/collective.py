"""The backend's own collectives on flat buffers, and the user's."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core import events, torch_compat
from shardkit.core.events import StorageKind
from shardkit.core.runtime.lanes import Program, Reduction, hold, note_sources_read
from shardkit.core.runtime.memory import Pool
from shardkit.core.runtime.plan import (
    GatherPlan,
    Mean,
    ReducePlan,
    Transport,
    as_dtype,
    report_allocated,
    report_freed,
    reported,
    shaped,
)
from shardkit.core.torch_compat import foreach_copy_, foreach_zero_

# Dtypes that every backend gathers. Other dtypes, and lists of several, are sent as bytes.
PLAIN_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int32, torch.int64}


class C10dTransport(Transport):
    """All-gather and reduce-scatter of flat buffers with equal, padded slots.

    If the backend `coalesces` (NCCL before torch 2.15), a list of buffers runs in place in one launch. If not, each
    call receives one buffer and uses the plain collectives, which every backend has. With `memory`, unsharded
    parameters, packed buffers and outputs lie there (runtime/memory.py, Note [Registered memory]).
    """

    name = "c10d"
    collective = True

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, coalesces: bool, memory: Pool | None = None
    ) -> None:
        super().__init__(group, device)
        self.coalesces = coalesces
        if memory is not None:
            self.registered_memory = memory
        self._averages = has_average(group, device)
        # On a stream lane a blocking call only orders work on this stream, and avoids a switch to another stream.
        self._async = device.type == "cpu"

    def gather(self, plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
        packed = None
        if plan.packing is not None:
            packed = self.buffer(plan.packing.numel, plan.packed_dtype, plan.label, "packed")
        return self._gather(plan, sources, flats, packed)

    def _gather(
        self,
        plan: GatherPlan,
        sources: Sequence[torch.Tensor],
        flats: Sequence[torch.Tensor],
        packed: torch.Tensor | None,
    ) -> Program:
        launched = time.perf_counter()
        buffers = [flats[i] for i in plan.direct]
        if packed is not None:
            buffers.append(packed)
        _write_own_chunks(plan, sources, flats, packed)
        note_sources_read()
        with reported(plan, launched):
            try:
                if buffers:
                    yield self.all_gather(buffers)
                if packed is not None:
                    assert plan.packing is not None
                    plan.packing.copy_out(packed, flats)
            finally:
                if packed is not None:
                    report_freed(packed, plan.label, "packed")

    def all_gather(self, buffers: Sequence[torch.Tensor]) -> Sequence[dist.Work | None]:
        """Fills every rank's slot of each 1-D buffer from that rank's own slot, in place (collective)."""
        outputs = list(buffers)
        dtypes = {output.dtype for output in outputs}
        if len(dtypes) > 1 or not dtypes <= PLAIN_DTYPES:
            outputs = [output.view(torch.uint8) for output in outputs]
        chunks = [output.numel() // self.world_size for output in outputs]
        inputs = [output.narrow(0, self.rank * chunk, chunk) for output, chunk in zip(outputs, chunks, strict=True)]
        if len(inputs) == 1:
            return (torch_compat.all_gather_flat(outputs[0], inputs[0], group=self.group, async_op=self._async),)
        assert self.coalesces, "plans pack what cannot run in one launch"
        return (torch_compat.all_gather_coalesced(self.group, outputs, inputs, self._async),)

    def exchange(
        self, outgoing: torch.Tensor, sent: Sequence[int], incoming: torch.Tensor, received: Sequence[int]
    ) -> Sequence[dist.Work | None]:
        """Sends part `r` of `outgoing` to each rank `r`, and receives part `r` of `incoming` from there (collective).

        Both are 1-D tensors of bytes; `sent` and `received` are the sizes of the parts. Those of this rank are empty.
        """
        sizes = list(received), list(sent)
        return (dist.all_to_all_single(incoming, outgoing, *sizes, group=self.group, async_op=self._async),)

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any
    ) -> Sequence[dist.Work | None]:
        """Reduces each 1-D input (world_size rows) over the ranks and writes this rank's row to the 1-D output."""
        if len(inputs) == 1:
            call = torch_compat.reduce_scatter_flat
            return (call(outputs[0], inputs[0], op=op, group=self.group, async_op=self._async),)
        assert self.coalesces, "plans pack what cannot run in one launch"
        return (torch_compat.reduce_scatter_coalesced(self.group, list(outputs), list(inputs), op, self._async),)

    def reduce(self, plan: ReducePlan, grads: list[torch.Tensor], mean: Mean) -> Reduction:
        if not self._averages:
            mean = mean.as_sum(self.world_size)
        packed = plan.pack(grads)
        divided = (grads[i] if mean.before is None else torch.div(grads[i], mean.before) for i in plan.direct)
        rows = [grad.to(plan.wire_dtype).contiguous().view(-1) for grad in divided]
        grads.clear()
        report_allocated(plan.direct_nbytes, plan.label, "gradient")
        return self._reduce(plan, rows, packed, mean)

    def _reduce(self, plan: ReducePlan, rows: list[torch.Tensor], packed: torch.Tensor | None, mean: Mean) -> Reduction:
        """One reduce-scatter for each direct gradient, in place, and one for the packed buffer."""
        launched = time.perf_counter()
        output = plan.allocate_output()
        inputs = rows if packed is None else [*rows, packed]
        hold(*inputs)
        if packed is not None and mean.before is not None:
            packed.div_(mean.before)
        sizes = [row.numel() // self.world_size for row in inputs]
        with reported(plan, launched):
            try:
                if inputs:
                    yield self.reduce_scatter(list(output.split_with_sizes(sizes)), inputs, mean.op)
                if mean.after is not None:
                    output.div_(mean.after)
            finally:
                if packed is not None:
                    report_freed(packed, plan.label, "packed")
                report_freed(plan.direct_nbytes, plan.label, "gradient")
        return output


class CustomTransport(C10dTransport):
    """Packs everything and sends it through the user's object: an `AllGather`, or a `ReduceScatter`."""

    name = "custom"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, comm: Any) -> None:
        super().__init__(group, device, coalesces=False)
        self._comm = comm

    def all_gather(self, buffers: Sequence[torch.Tensor]) -> Sequence[dist.Work | None]:
        (buffer,) = buffers
        chunk = buffer.numel() // self.world_size
        own = buffer.narrow(0, self.rank * chunk, chunk)
        work = self._comm(output_tensor=buffer, input_tensor=own, group=self.group, async_op=self._async)
        return (work,)

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any
    ) -> Sequence[dist.Work | None]:
        (output,), (full,) = outputs, inputs
        work = self._comm(output_tensor=output, input_tensor=full, group=self.group, op=op, async_op=self._async)
        return (work,)

    def buffer(self, numel: int, dtype: torch.dtype, label: str, kind: StorageKind) -> torch.Tensor:
        buffer: torch.Tensor = self._comm.allocate((numel,), dtype=dtype, device=self.device)
        if buffer.numel() != numel or buffer.dtype != dtype or not buffer.is_contiguous():
            raise ValueError(
                f"{label}: {type(self._comm).__name__}.allocate returned {buffer.numel()} elements of {buffer.dtype} "
                f"with strides {buffer.stride()}, expected {numel} of {dtype}, contiguous; return what was asked for"
            )
        report_allocated(buffer, label, kind)
        return buffer.view(-1)


def has_average(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend that serves `device` in `group` has a native AVG; on others it is a sum and a division.

    The name of a group with several backends is that of one of them, so the backend is asked.
    """
    backend = torch_compat.backend_of(group, device)
    return backend is not None and backend.name().startswith("nccl")


def _write_own_chunks(
    plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor], packed: torch.Tensor | None
) -> None:
    """Write this rank's chunks, cast, into its slots and into its row of the packed buffer, and zeros beside them.

    Padding that is sent is zero, so that checks for NaN and for uninitialised memory find nothing in it.
    """
    targets = [shaped(flats[i].narrow(0, start, numel), shape) for i, start, numel, shape in plan.own_slots]
    chunks = [sources[i] for i, _, _, _ in plan.own_slots]
    padding = [flats[i].narrow(0, start, numel) for i, start, numel in plan.slot_padding]
    if packed is not None:
        assert plan.packing is not None
        row = packed.narrow(0, plan.rank * plan.packing.row_numel, plan.packing.row_numel)
        pieces = row.split_with_sizes([numel for _, numel, _ in plan.own_row])
        for piece, (item, _, shape) in zip(pieces, plan.own_row, strict=True):
            if item is None:
                padding.append(piece)
            else:
                targets.append(shaped(as_dtype(piece, plan.items[item].dtype), shape))
                chunks.append(sources[item])
    if targets:
        foreach_copy_(targets, chunks, non_blocking=True)
    if padding:
        foreach_zero_(padding)


# -- one rank, and all-reduce ------------------------------------------------------------------------------------------


def gather_alone(sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
    """The gather of a single rank, whose chunk is the tensor: casts and moves it. Arguments as `Transport.gather`."""
    shaped = [flat[: source.numel()].view(source.shape) for source, flat in zip(sources, flats, strict=True)]
    foreach_copy_(shaped, list(sources), non_blocking=True)
    note_sources_read()
    return
    yield  # a program, though nothing is waited for


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, label: str) -> Program:
    """The program that all-reduces the contiguous `tensor` in place. Collective over `group`, in launch order.

    `label` names the parameter group in events. If the backend has no AVG, it is a sum and a division.
    """
    world = group.size()
    if world == 1:
        return
    launched = time.perf_counter()
    divides = op == dist.ReduceOp.AVG and not has_average(group, tensor.device)
    nbytes = tensor.numel() * tensor.itemsize
    # A ring sends each element twice except the rank's own share: reduce-scatter, then all-gather.
    described = (label, (), nbytes, 2 * (world - 1) * nbytes // world, tensor.dtype, group)
    if events.hub.active:
        events.emit(events.AllReduceStarted(*described, transport="c10d"))
    # As in `C10dTransport`: on a stream lane a blocking call only orders work on this stream.
    asynchronous = tensor.device.type == "cpu"
    yield (dist.all_reduce(tensor, dist.ReduceOp.SUM if divides else op, group, async_op=asynchronous),)
    if divides:
        tensor.div_(world)
    if events.hub.active:
        events.emit(events.AllReduceFinished(*described, time.perf_counter() - launched, transport="c10d"))


def agree(digest: bytes, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of `group` passed the same digest (collective; 16 bytes on the wire).

    One all-reduce: the maxima of a value and of its negation cancel only if all values are equal.
    """
    if dist.get_backend(group) == "fake":  # all its ranks are this one
        return True
    value = int.from_bytes(hashlib.blake2b(digest, digest_size=7).digest(), "big")
    pair = torch.tensor([value, -value], dtype=torch.int64, device=device)
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    high, low = pair.tolist()
    return bool(high == -low)
