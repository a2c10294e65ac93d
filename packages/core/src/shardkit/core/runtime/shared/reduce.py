"""The reduction among ranks of one host: each puts what its peers sum into its outbox and sums what it finds in theirs.

Gradients are read once, at the start, and let go of. The sum runs in rank order, see Note [Rank order] in
`runtime/reduce.py`: this rank's own terms wait in the output.
"""

from __future__ import annotations

import time

import torch

from shardkit.core import events
from shardkit.core.runtime.buffers import note_let_go, note_taken
from shardkit.core.runtime.details import details
from shardkit.core.runtime.plan import ReducePlan
from shardkit.core.runtime.program import Program
from shardkit.core.runtime.shared.neighbours import Channel
from shardkit.core.runtime.shared.posting import Posting
from shardkit.core.runtime.transport.shared import SharedTransport
from shardkit.core.torch_compat import foreach_copy_


@torch.no_grad()
def shared_reduce(
    plan: ReducePlan,
    grads: list[torch.Tensor],
    output: torch.Tensor,
    before: float | None,
    after: float | None,
) -> Program:
    """The program that reduces `plan`'s gradients, as `runtime.reduce.reduce_scatter` says; empties `grads`."""
    launched = time.perf_counter()
    note_taken(plan.nbytes, plan.label)
    transport = plan.transport
    assert isinstance(transport, SharedTransport)
    posting = _post(plan, transport, grads, output)
    grads.clear()
    note_let_go(plan.nbytes, plan.label)
    described = (plan.label, plan.fqns, plan.nbytes, plan.wire_nbytes, plan.wire_dtype, transport.group)
    try:
        if events.hub.active:
            events.emit(events.ReduceStarted(*described, **details(plan)))
        yield (posting,)
        terms = [None if peer is None else peer[plan.rank] for peer in posting.peers]
        _sum(plan, terms, output, before)
        if after is not None:
            output.div_(after)
    finally:
        posting.release()
    if events.hub.active:
        events.emit(events.ReduceFinished(*described, time.perf_counter() - launched, **details(plan)))


def _post(plan: ReducePlan, transport: SharedTransport, grads: list[torch.Tensor], output: torch.Tensor) -> Posting:
    """Copies the peers' rows to the outbox, in `wire_dtype`, and this rank's own to the output."""
    specs = tuple((0 if rank == plan.rank else numel, plan.wire_dtype) for rank, numel in enumerate(plan.row_numels))
    parcel = transport.outbox.parcel(specs, plan.label)
    rows, table = parcel.cut(plan.label, specs)
    rows = [output if rank == plan.rank else row for rank, row in enumerate(rows)]
    targets: list[torch.Tensor] = []
    chunks: list[torch.Tensor] = []
    pieces = [row.split_with_sizes(sizes) for row, sizes in zip(rows, plan.piece_sizes, strict=True)]
    for i, (item, grad) in enumerate(zip(plan.items, grads, strict=True)):
        layout = item.layout
        for rank, chunk in enumerate(grad.split(layout.chunk, layout.dim)):
            if chunk.numel():
                targets.append(pieces[rank][i].view(chunk.shape))
                chunks.append(chunk)
    if targets:
        foreach_copy_(targets, chunks)
    return transport.send(parcel, table, Channel.REDUCE)


def _sum(plan: ReducePlan, terms: list[torch.Tensor | None], output: torch.Tensor, before: float | None) -> None:
    """Adds the peers' terms to this rank's own, which stand in `output`, in rank order."""
    if not output.numel():
        return
    if before is not None:
        output.div_(before)
    earlier = _term(plan, terms[0], before) if plan.rank else None
    if earlier is not None:
        for term in terms[1 : plan.rank]:
            earlier.add_(_term(plan, term, before))
        output.add_(earlier)
    for term in terms[plan.rank + 1 :]:
        output.add_(_term(plan, term, before))


def _term(plan: ReducePlan, term: torch.Tensor | None, before: float | None) -> torch.Tensor:
    """A peer's row, ready to be added to in place: nobody else reads it, so it may be the peer's own memory."""
    assert term is not None and term.numel() == plan.output_numel, plan.label
    term = term.to(plan.reduce_dtype)
    return term if before is None else term.div_(before)
