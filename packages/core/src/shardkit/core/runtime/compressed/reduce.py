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

import torch

from shardkit.core import events
from shardkit.core.runtime.buffers import note_allocated, note_freed, note_let_go, note_taken
from shardkit.core.runtime.compressed.rows import format_of, rows_of
from shardkit.core.runtime.compressed.wire import WireFormat
from shardkit.core.runtime.details import details
from shardkit.core.runtime.plan import ReducePlan
from shardkit.core.runtime.program import Program, hold
from shardkit.core.runtime.transport.compressed import CompressedTransport

__all__ = ["ReduceRows", "compressed_reduce"]


class ReduceRows:
    """A plan's rows: row `r` is what every rank sends to rank `r`. `sent` and `received` are bytes by rank."""

    def __init__(self, plan: ReducePlan, transport: CompressedTransport) -> None:
        policy, world, rank = transport.policy, transport.world_size, plan.rank
        layouts = [item.layout for item in plan.items]
        self.formats = [format_of(policy.reduce, policy.block, layout, plan.wire_dtype) for layout in layouts]
        self.rows = rows_of(layouts, self.formats, world)
        self.sent = tuple(0 if peer == rank else self.rows[peer].nbytes for peer in range(world))
        self.received = tuple(0 if peer == rank else self.rows[rank].nbytes for peer in range(world))
        self.anything = any(row.nbytes for row in self.rows)


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
    outgoing = transport.reduce_buffer(sum(rows.sent), torch.uint8, plan.label)
    incoming = transport.reduce_buffer(sum(rows.received), torch.uint8, plan.label)
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
    described = (plan.label, plan.fqns, plan.nbytes, sum(rows.sent), torch.uint8, transport.group)
    if events.hub.active:
        events.emit(events.ReduceStarted(*described, **details(plan)))
    try:
        if rows.anything:
            yield transport.swap(outgoing, rows.sent, incoming, rows.received)
        _sum(plan, rows, incoming, plan.output_views(total), before)
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
    chunks = [grad.split(item.layout.chunk, item.layout.dim) for item, grad in zip(plan.items, grads, strict=True)]
    for item, piece in enumerate(own):
        if piece.numel():
            piece.copy_(chunks[item][plan.rank])
    for rank, wire in enumerate(outgoing.split_with_sizes(list(rows.sent))):
        for item, start, nbytes, numel in rows.rows[rank].chunks if rank != plan.rank else ():
            values, target, form = chunks[item][rank].reshape(-1), wire[start : start + nbytes], rows.formats[item]
            if transport.policy.error_feedback and not form.lossless:
                _write_with_feedback(form, values, target, _residual(plan, transport, item, rank, numel))
            else:
                form.write(values, target)


def _residual(plan: ReducePlan, transport: CompressedTransport, item: int, rank: int, numel: int) -> torch.Tensor:
    """What rounding has kept back so far of the gradient of `item` that goes to `rank`: 1-D, fp32."""
    fqn = plan.items[item].fqn
    residual = transport.residuals.get((fqn, rank))
    if residual is None:
        residual = transport.residuals[fqn, rank] = torch.zeros(numel, dtype=torch.float32, device=transport.device)
        note_allocated(residual, fqn, "residual")
    return residual


def _write_with_feedback(form: WireFormat, values: torch.Tensor, wire: torch.Tensor, residual: torch.Tensor) -> None:
    """See Note [Error feedback]."""
    residual.add_(values)
    form.write(residual, wire)
    sent = torch.empty_like(residual)
    form.read(wire, sent)
    residual.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)


def _sum(
    plan: ReducePlan, rows: ReduceRows, incoming: torch.Tensor, own: list[torch.Tensor], before: float | None
) -> None:
    """Adds the peers' terms to this rank's own, in rank order."""
    received = incoming.split_with_sizes(list(rows.received))
    for item, start, nbytes, numel in rows.rows[plan.rank].chunks:
        mine = own[item].view(-1)
        if before is not None:
            mine.div_(before)
        earlier, term = mine.new_empty(numel if plan.rank else 0), mine.new_empty(numel)
        for rank, wire in enumerate(received):
            if rank == plan.rank:
                if rank:
                    mine.add_(earlier)
                continue
            target = term if rank else earlier  # where the sum of the earlier terms begins
            rows.formats[item].read(wire[start : start + nbytes], target)
            if before is not None:
                target.div_(before)
            if rank:
                (earlier if rank < plan.rank else mine).add_(term)
