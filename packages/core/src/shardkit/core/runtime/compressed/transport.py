"""Gathers and reductions with compression: rounded shards and gradients are sent as rows of bytes.

In a gather every rank's chunks are sent as one row and unpacked into place. This rank's own chunk is rounded through
the wire format too, so that all ranks compute with the same parameters.

In a reduction rows of gradients go to their owners, who sum them in fp32, in rank order (`plan.py`, Note [Rank order]).
A rank's own terms are not sent, so they are not rounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shardkit.core.events import StorageKind
from shardkit.core.policies import CompressionPolicy
from shardkit.core.runtime.compressed.wire import Row, RowRun, WireFormat, chunks_of, format_of, rows_of
from shardkit.core.runtime.lanes import Program, Reduction, hold, note_sources_read
from shardkit.core.runtime.plan import (
    GatherItem,
    GatherPlan,
    Mean,
    ReduceItem,
    ReducePlan,
    Transport,
    report_allocated,
    report_freed,
    reported,
    strided,
)


class GatherRows:
    """A plan's rows by runs of ranks, and this rank's own row. In the buffer each takes `row_nbytes`."""

    def __init__(self, plan: GatherPlan, transport: CompressedTransport) -> None:
        self.formats = [_gather_format(transport.policy, item) for item in plan.items]
        self.runs = rows_of([item.layout for item in plan.items], self.formats)
        self.row_nbytes = max(run.row.nbytes for run in self.runs)
        (self.own,) = (run.row for run in self.runs if run.first <= plan.rank < run.first + run.ranks)
        self.nbytes = self.row_nbytes * transport.world_size


class ReduceRows:
    """A plan's rows: row `r` is sent by every rank to rank `r`. `peers` are those of all ranks except this one.

    `sent` and `received` are the sizes of the buffers' parts in bytes, `sent_at` and `received_at` their places, with
    the ends. A rank's own part is empty.
    """

    def __init__(self, plan: ReducePlan, transport: CompressedTransport) -> None:
        policy, world, rank = transport.policy, transport.world_size, plan.rank
        layouts = [item.layout for item in plan.items]
        self.formats = [format_of(policy.reduce, policy.block, layout, plan.wire_dtype) for layout in layouts]
        self.own = Row(())
        self.peers: list[RowRun] = []
        self.sent: list[int] = []
        for first, ranks, row in rows_of(layouts, self.formats):
            before, after = max(0, min(ranks, rank - first)), max(0, min(ranks, first + ranks - rank - 1))
            if before + after < ranks:
                self.own = row
            for begin, count in ((first, before), (first + ranks - after, after)):
                if count:
                    self.peers.append(RowRun(begin, count, row))
            self.sent += [row.nbytes] * before + [0] * (ranks - before - after) + [row.nbytes] * after
        self.received = [0 if peer == rank else self.own.nbytes for peer in range(world)]
        self.sent_at = [*accumulate(self.sent, initial=0)]
        self.received_at = [*accumulate(self.received, initial=0)]


class CompressedTransport(Transport):
    """Sends rows through `over`, a `C10dTransport` or what stands in for it."""

    name = "compressed"

    def __init__(self, over: Any, policy: CompressionPolicy) -> None:
        super().__init__(over.group, over.device)
        self.policy = policy
        self._gathers: WeakKeyDictionary[GatherPlan, GatherRows] = WeakKeyDictionary()
        self._reductions: WeakKeyDictionary[ReducePlan, ReduceRows] = WeakKeyDictionary()
        self._over = over

    def for_gather(self, items: Sequence[GatherItem]) -> Transport:
        formats = [_gather_format(self.policy, item) for item in items]
        return self._over if all(form.lossless for form in formats) else self

    def for_reduction(
        self, items: Sequence[ReduceItem], wire_dtype: torch.dtype, reduce_dtype: torch.dtype
    ) -> Transport:
        """Itself, even if nothing is rounded, where the collective below would send wider elements than are given."""
        formats = [format_of(self.policy.reduce, self.policy.block, item.layout, wire_dtype) for item in items]
        widened = wire_dtype.itemsize < reduce_dtype.itemsize
        return self._over if all(form.lossless for form in formats) and not widened else self

    def buffer(self, numel: int, dtype: torch.dtype, label: str, kind: StorageKind) -> torch.Tensor:
        buffer: torch.Tensor = self._over.buffer(numel, dtype, label, kind)
        return buffer

    def gather_buffer_bytes(self, plan: GatherPlan) -> int:
        return self._gather_rows(plan).nbytes

    def _gather_rows(self, plan: GatherPlan) -> GatherRows:
        rows = self._gathers.get(plan)
        if rows is None:
            rows = self._gathers[plan] = GatherRows(plan, self)
        return rows

    def gather(self, plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
        rows = self._gather_rows(plan)
        buffer = self.buffer(rows.nbytes, torch.uint8, plan.label, "packed")
        return self._gather(plan, rows, sources, flats, buffer)

    def _gather(
        self,
        plan: GatherPlan,
        rows: GatherRows,
        sources: Sequence[torch.Tensor],
        flats: Sequence[torch.Tensor],
        buffer: torch.Tensor,
    ) -> Program:
        launched = time.perf_counter()
        own = buffer.narrow(0, plan.rank * rows.row_nbytes, rows.row_nbytes).zero_()
        for item, start, nbytes, _ in rows.own.chunks:
            rows.formats[item].write(sources[item].to(buffer.device).reshape(-1), own[start : start + nbytes])
        note_sources_read()
        with reported(plan, launched, rows.nbytes - rows.row_nbytes, torch.uint8):
            try:
                if rows.nbytes:
                    yield self._over.all_gather([buffer])
                _unpack(plan, rows, flats, buffer)
            finally:
                report_freed(buffer, plan.label, "packed")

    def reduce(self, plan: ReducePlan, grads: list[torch.Tensor], mean: Mean) -> Reduction:
        rows = self._reductions.get(plan)
        if rows is None:
            rows = self._reductions[plan] = ReduceRows(plan, self)
        outgoing = self.buffer(rows.sent_at[-1], torch.uint8, plan.label, "reduce_input")
        # Holds this rank's terms and the sum, in fp32 even if the reduce dtype is narrower.
        wide = torch.promote_types(plan.reduce_dtype, torch.float32)
        total = torch.empty(plan.output_numel, dtype=wide, device=self.device)
        report_allocated(total, plan.label, "reduce_input")
        self._pack(plan, rows, grads, outgoing.zero_(), plan.output_views(total))
        grads.clear()
        report_allocated(0, plan.label, "gradient")  # for listeners: taken over, and freed already
        return self._reduce(plan, rows, outgoing, total, mean.as_sum(self.world_size))

    def _reduce(
        self, plan: ReducePlan, rows: ReduceRows, outgoing: torch.Tensor, total: torch.Tensor, mean: Mean
    ) -> Reduction:
        launched = time.perf_counter()
        hold(outgoing, total)
        output = plan.allocate_output()
        incoming = self.buffer(rows.received_at[-1], torch.uint8, plan.label, "reduce_input")
        with reported(plan, launched, rows.sent_at[-1], torch.uint8):
            try:
                if any(rows.sent) or any(rows.received):
                    yield self._over.exchange(outgoing, rows.sent, incoming, rows.received)
                if total.numel():
                    rank, after = plan.rank, self.world_size - plan.rank - 1
                    earlier = _terms(rows, incoming, total, RowRun(0, rank, rows.own))
                    mean.add_up(total, earlier, _terms(rows, incoming, total, RowRun(rank + 1, after, rows.own)))
                output.copy_(total)
            finally:
                for buffer in (outgoing, total, incoming):
                    report_freed(buffer, plan.label, "reduce_input")
        return output

    def _pack(
        self,
        plan: ReducePlan,
        rows: ReduceRows,
        grads: list[torch.Tensor],
        outgoing: torch.Tensor,
        own: list[torch.Tensor],
    ) -> None:
        """Writes the peers' rows, and this rank's own terms to `own`."""
        for piece, grad, mine in zip(own, grads, plan.items, strict=True):
            layout = mine.layout
            piece.copy_(grad.narrow(layout.dim, layout.offset(plan.rank), layout.length(plan.rank)))
        for run in rows.peers:
            for item, start, nbytes, numel in run.row.chunks:
                form, layout = rows.formats[item], plan.items[item].layout
                for first, ranks in run.batches(numel, outgoing.device):
                    at = rows.sent_at[first] + start
                    target = strided(outgoing, (ranks, nbytes), (run.row.nbytes, 1), at)
                    form.write(chunks_of(grads[item], layout, first, ranks).reshape(ranks, numel), target)


def _gather_format(policy: CompressionPolicy, item: GatherItem) -> WireFormat:
    return format_of(policy.gather if item.compressible else None, policy.block, item.layout, item.dtype)


def _unpack(plan: GatherPlan, rows: GatherRows, flats: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    for run in rows.runs:
        for item, start, nbytes, numel in run.row.chunks:
            layout, flat, form = plan.items[item].layout, flats[item], rows.formats[item]
            whole = flat[: layout.numel].view(layout.shape)
            for first, ranks in run.batches(numel, buffer.device):
                wire = strided(buffer, (ranks, nbytes), (rows.row_nbytes, 1), first * rows.row_nbytes + start)
                places = chunks_of(whole, layout, first, ranks)
                if layout.dim == 0:  # the chunks are dense in the target
                    form.read(wire, places.view(ranks, numel))
                    continue
                chunks = flat.new_empty(ranks, numel)
                form.read(wire, chunks)
                places.copy_(chunks.view(places.shape))


def _terms(rows: ReduceRows, incoming: torch.Tensor, total: torch.Tensor, run: RowRun) -> Iterator[torch.Tensor]:
    """The terms that each rank of `run` has sent, like `total`."""
    for first, ranks in run.batches(total.numel(), total.device):
        terms, end = total.new_empty(ranks, total.numel()), 0
        for item, start, nbytes, numel in run.row.chunks:
            wire = strided(incoming, (ranks, nbytes), (run.row.nbytes, 1), rows.received_at[first] + start)
            rows.formats[item].read(wire, terms[:, end : end + numel])
            end += numel
        yield from terms
