"""The compressed reduce-scatter: rows of gradients go to their owners in few bytes, who sum them in fp32.

A rank's own terms are not sent, so they are not rounded. The sum runs in rank order, see Note [Rank order] in
`runtime/reduce.py`.

Note [Error feedback]
What rounding took from a gradient on its way to another rank is kept and added to the next one before that is rounded
(Seide et al., 2014; Karimireddy et al., 2019, arXiv:1901.09847). So errors do not add up over steps: what an owner has
received in all differs from what was computed in all by one rounding. The memory is one fp32 element for each that is
sent, `(W - 1) / W` of the compressed parameters. An error that is not finite is dropped, or it would stay for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from shardkit.core import events
from shardkit.core.runtime.buffers import note_allocated, note_freed, note_let_go, note_taken
from shardkit.core.runtime.compressed.rows import Row, RowRun, chunks_of, format_of, rows_of
from shardkit.core.runtime.compressed.wire import WireFormat
from shardkit.core.runtime.details import details
from shardkit.core.runtime.packing import strided
from shardkit.core.runtime.plan import ReducePlan
from shardkit.core.runtime.program import Program, hold
from shardkit.core.runtime.slots import Slots
from shardkit.core.runtime.transport.compressed import CompressedTransport

__all__ = ["ReduceRows", "compressed_reduce"]


class ReduceRows:
    """A plan's rows: row `r` is what every rank sends to rank `r`, in bytes.

    `peers` are the rows of all ranks but this one, `own` its own; `sent` and `received` are the slots of the buffers,
    of which a rank's own is empty.
    """

    def __init__(self, plan: ReducePlan, transport: CompressedTransport) -> None:
        policy, world, rank = transport.policy, transport.world_size, plan.rank
        layouts = [item.layout for item in plan.items]
        self.formats = [format_of(policy.reduce, policy.block, layout, plan.wire_dtype) for layout in layouts]
        self.own = Row(())
        self.peers: list[RowRun] = []
        sent: list[tuple[int, int]] = []
        for first, ranks, row in rows_of(layouts, self.formats):
            before, after = max(0, min(ranks, rank - first)), max(0, min(ranks, first + ranks - rank - 1))
            if before + after < ranks:
                self.own = row
            for begin, count in ((first, before), (first + ranks - after, after)):
                if count:
                    self.peers.append(RowRun(begin, count, row))
            sent += [(before, row.nbytes), (ranks - before - after, 0), (after, row.nbytes)]
        self.sent = Slots(tuple(sent))
        self.received = Slots(((rank, self.own.nbytes), (1, 0), (world - rank - 1, self.own.nbytes)))
        self.anything = bool(self.sent.numel or self.received.numel)


@torch.no_grad()
def compressed_reduce(
    plan: ReducePlan, grads: list[torch.Tensor], output: torch.Tensor, before: float | None, after: float | None
) -> Program:
    """The program that reduces `plan`'s gradients, as `runtime.reduce.reduce_scatter` says; empties `grads`."""
    transport = plan.transport
    assert isinstance(transport, CompressedTransport)
    rows = transport.reductions.get(plan)
    if rows is None:
        rows = transport.reductions[plan] = ReduceRows(plan, transport)
    note_taken(plan.nbytes, plan.label)
    outgoing = transport.reduce_buffer(rows.sent.numel, torch.uint8, plan.label)
    incoming = transport.reduce_buffer(rows.received.numel, torch.uint8, plan.label)
    # Own terms wait here, and the sum is made here: in fp32, whatever the reduce dtype is.
    wide = output.dtype.itemsize >= torch.float32.itemsize
    total = output if wide else torch.empty_like(output, dtype=torch.float32)
    for buffer in (outgoing, incoming):
        note_allocated(buffer, plan.label, "reduce_input")
    return _reduce(plan, rows, grads, output, total, outgoing, incoming, (before, after))


@torch.no_grad()
def _reduce(
    plan: ReducePlan,
    rows: ReduceRows,
    grads: list[torch.Tensor],
    output: torch.Tensor,
    total: torch.Tensor,
    outgoing: torch.Tensor,
    incoming: torch.Tensor,
    divisors: tuple[float | None, float | None],
) -> Program:
    launched = time.perf_counter()
    transport = plan.transport
    assert isinstance(transport, CompressedTransport)
    before, after = divisors
    hold(outgoing, incoming, total)
    _pack(plan, rows, transport, grads, outgoing, plan.output_views(total))
    grads.clear()
    note_let_go(plan.nbytes, plan.label)
    described = (plan.label, plan.fqns, plan.nbytes, rows.sent.numel, torch.uint8, transport.group)
    if events.hub.active:
        events.emit(events.ReduceStarted(*described, **details(plan)))
    try:
        if rows.anything:
            yield transport.swap(outgoing, rows.sent.sizes(), incoming, rows.received.sizes())
        _sum(plan, rows, incoming, total, before)
        if after is not None:
            total.div_(after)
        if total is not output:
            output.copy_(total)
    finally:
        for buffer in (outgoing, incoming):
            note_freed(buffer, plan.label, "reduce_input")
    if events.hub.active:
        events.emit(events.ReduceFinished(*described, time.perf_counter() - launched, **details(plan)))


def _pack(
    plan: ReducePlan,
    rows: ReduceRows,
    transport: CompressedTransport,
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
            for first, ranks in run.batches(numel):
                at = rows.sent.start(first) + start
                target = strided(outgoing, (ranks, nbytes), (run.row.nbytes, 1), at)
                values = chunks_of(grads[item], layout, first, ranks).reshape(ranks, numel)
                if transport.policy.error_feedback and not form.lossless:
                    _write_with_feedback(form, values, target, _residual(plan, transport, item, first, values.shape))
                else:
                    form.write(values, target)


def _residual(
    plan: ReducePlan, transport: CompressedTransport, item: int, first: int, shape: torch.Size
) -> torch.Tensor:
    """What rounding has kept back so far of the gradient of `item` that goes to the ranks from `first` on: fp32."""
    fqn = plan.items[item].fqn
    residual = transport.residuals.get((fqn, first))
    if residual is None:
        residual = transport.residuals[fqn, first] = torch.zeros(shape, dtype=torch.float32, device=transport.device)
        note_allocated(residual, fqn, "residual")
    return residual


def _write_with_feedback(form: WireFormat, values: torch.Tensor, wire: torch.Tensor, residual: torch.Tensor) -> None:
    """See Note [Error feedback]."""
    residual.add_(values)
    form.write(residual, wire)
    sent = torch.empty_like(residual)
    form.read(wire, sent)
    residual.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)


def _sum(plan: ReducePlan, rows: ReduceRows, incoming: torch.Tensor, total: torch.Tensor, before: float | None) -> None:
    """Adds the peers' terms to this rank's own, which stand in `total`, in rank order."""
    if not total.numel():
        return
    if before is not None:
        total.div_(before)
    rank, world = plan.rank, plan.transport.world_size
    earlier: torch.Tensor | None = None
    for term in _terms(rows, incoming, total, before, RowRun(0, rank, rows.own)):
        earlier = term if earlier is None else earlier.add_(term)
    if earlier is not None:
        total.add_(earlier)
    for term in _terms(rows, incoming, total, before, RowRun(rank + 1, world - rank - 1, rows.own)):
        total.add_(term)


def _terms(
    rows: ReduceRows, incoming: torch.Tensor, total: torch.Tensor, before: float | None, run: RowRun
) -> Iterator[torch.Tensor]:
    """What each rank of `run` has sent, like `total`."""
    for first, ranks in run.batches(total.numel()):
        terms, end = total.new_empty(ranks, total.numel()), 0
        for item, start, nbytes, numel in run.row.chunks:
            wire = strided(incoming, (ranks, nbytes), (run.row.nbytes, 1), rows.received.start(first) + start)
            rows.formats[item].read(wire, terms[:, end : end + numel])
            end += numel
        if before is not None:
            terms.div_(before)
        yield from terms
