"""The reduction of a group: the sum over ranks of every gradient, of which each rank gets its own chunks.

Note [Rank order]: floating-point addition does not associate, so a sum that runs in order of arrival differs from run
to run. Where the owner sums (`Exchange`), the terms are added in rank order: `((t0 + t1) + t2) + ...`. Addition does
commute, so the first two terms may be taken in either order, which lets the first peer's rows arrive in the output
itself whenever wire dtype and reduce dtype are one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core import events
from shardkit.core.runtime.buffers import note_allocated, note_freed, note_let_go, note_taken
from shardkit.core.runtime.compressed.reduce import compressed_reduce
from shardkit.core.runtime.details import details
from shardkit.core.runtime.plan import ReducePlan
from shardkit.core.runtime.program import Program, hold
from shardkit.core.runtime.shared.reduce import shared_reduce
from shardkit.core.runtime.transport.compressed import CompressedTransport
from shardkit.core.runtime.transport.shared import SharedTransport
from shardkit.core.runtime.transport.stand_in import StandIn
from shardkit.core.torch_compat import foreach_add_, foreach_copy_, foreach_div

# Backends whose AVG is their own operation. Elsewhere it is a sum, then a division, which every backend can do.
_NATIVE_AVG = ("nccl",)


@dataclass(frozen=True)
class _Scaling:
    """What is divided by what: each term by `before`, the sum by `after`; None leaves it as it is."""

    before: float | None
    after: float | None


@torch.no_grad()
def reduce_scatter(
    plan: ReducePlan,
    grads: list[torch.Tensor],
    output: torch.Tensor,
    *,
    predivide: float | None,
    postdivide: float | None,
    op: Any,
) -> Program:
    """The program that reduces `plan`'s gradients. Collective over the plan's group, in launch order.

    `grads[i]` is the full gradient, of shape `items[i].layout.shape` and of `grad_dtype`, of any strides; it is read
    until the program is done, or has emptied the list, and never written. `output` is a 1-D tensor of `reduce_dtype`
    with `output_numel` elements; afterwards `plan.output_views(output)` are the reduced chunks: the sum over ranks in
    `reduce_dtype`, each term divided by `predivide` and the sum by `postdivide` where they are given. `op` is SUM, or
    AVG (only without divisors) for the sum divided by the world size, or another operation that a collective backend
    knows.

    Buffers are allocated now, on the current stream. Raises `ValueError` when custom communication allocates a wrong
    one.
    """
    world = plan.transport.world_size
    average = op == dist.ReduceOp.AVG
    assert not average or (predivide is None and postdivide is None), "AVG takes no divisors"
    if world == 1:
        return _copy_alone(plan, grads, output, _Scaling(predivide, postdivide))
    if isinstance(plan.transport, SharedTransport):
        return shared_reduce(plan, grads, output, predivide, float(world) if average else postdivide)
    if isinstance(plan.transport, StandIn):
        return plan.transport.reduce_program(plan, grads, output)
    if isinstance(plan.transport, CompressedTransport):
        return compressed_reduce(plan, grads, output, predivide, float(world) if average else postdivide)
    note_taken(plan.nbytes, plan.label)
    packed = None
    if plan.packing is not None:
        packed = plan.transport.reduce_buffer(plan.packing.numel, plan.wire_dtype, plan.label)
        note_allocated(packed, plan.label, "packed")
    if plan.exchange is not None:
        return _exchange(plan, grads, output, packed, _Scaling(predivide, float(world) if average else postdivide))
    if average and plan.transport.group.name() not in _NATIVE_AVG:
        op, postdivide = dist.ReduceOp.SUM, float(world)
    rows = [_direct_rows(plan, grads[i], predivide) for i in plan.direct]
    return _collective(plan, grads, output, rows, packed, _Scaling(predivide, postdivide), op)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, label: str) -> Program:
    """The program that all-reduces the contiguous `tensor` in place. Collective over `group`, in launch order.

    `label` names the parameter group in events. AVG is a sum and a division where the backend has no AVG of its own.
    """
    return _all_reduce(tensor, group, op, label)


@torch.no_grad()
def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, label: str) -> Program:
    world = group.size()
    if world == 1:
        return
    launched = time.perf_counter()
    divide = op == dist.ReduceOp.AVG and group.name() not in _NATIVE_AVG
    nbytes = tensor.numel() * tensor.itemsize
    # A ring sends each element twice but for the rank's own share: reduce-scatter, then all-gather.
    described = (label, (), nbytes, 2 * (world - 1) * nbytes // world, tensor.dtype, group)
    if events.hub.active:
        events.emit(events.AllReduceStarted(*described, transport="c10d"))
    work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM if divide else op, group=group, async_op=True)
    yield () if work is None else (work,)
    if divide:
        tensor.div_(world)
    if events.hub.active:
        events.emit(events.AllReduceFinished(*described, time.perf_counter() - launched, transport="c10d"))


@torch.no_grad()
def _copy_alone(plan: ReducePlan, grads: Sequence[torch.Tensor], output: torch.Tensor, scaling: _Scaling) -> Program:
    """World size 1: the gradient is the sum."""
    foreach_copy_(plan.output_views(output), list(grads))
    _divide(output, scaling.before)
    _divide(output, scaling.after)
    return
    yield  # a program, though nothing is waited for


@torch.no_grad()
def _collective(
    plan: ReducePlan,
    grads: Sequence[torch.Tensor],
    output: torch.Tensor,
    rows: list[torch.Tensor],
    packed: torch.Tensor | None,
    scaling: _Scaling,
    op: Any,
) -> Program:
    """One reduce-scatter for each direct gradient, from where it is, and one for the packed buffer."""
    launched = time.perf_counter()
    inputs = rows if packed is None else [*rows, packed]
    hold(*inputs)
    if packed is not None:
        assert plan.packing is not None
        plan.packing.fill(packed, grads)
        _divide(packed, scaling.before)
    sizes = [row.numel() // plan.transport.world_size for row in inputs]
    _announce(plan)
    try:
        if inputs:
            yield plan.collective.reduce_scatter(list(output.split_with_sizes(sizes)), inputs, op)
        _divide(output, scaling.after)
    finally:
        _note_dropped(plan, packed, None)
    _conclude(plan, launched)


@torch.no_grad()
def _exchange(
    plan: ReducePlan,
    grads: Sequence[torch.Tensor],
    output: torch.Tensor,
    packed: torch.Tensor | None,
    scaling: _Scaling,
) -> Program:
    """Send every row to its owner, receive the peers' terms of this rank's rows, and sum them in rank order."""
    assert plan.exchange is not None
    launched = time.perf_counter()
    outgoing = _rows_by_rank(plan, grads, packed)
    landing, staging = _landing_rows(plan, output)
    incoming = [() if row is None else row.split_with_sizes(plan.row_sizes) for row in landing]
    _announce(plan)
    try:
        yield plan.exchange.exchange(outgoing, incoming)
        _sum(plan, outgoing[plan.rank], landing, output, scaling.before)
        _divide(output, scaling.after)
    finally:
        _note_dropped(plan, packed, staging)
    _conclude(plan, launched)


def _direct_rows(plan: ReducePlan, grad: torch.Tensor, divisor: float | None) -> torch.Tensor:
    """The gradient as a flat tensor in wire dtype; the gradient itself unless strides, dtype or a divisor forbid."""
    if divisor is not None:
        return torch.div(grad, divisor).to(plan.wire_dtype).contiguous().view(-1)
    return grad.to(plan.wire_dtype).contiguous().view(-1)


def _rows_by_rank(
    plan: ReducePlan, grads: Sequence[torch.Tensor], packed: torch.Tensor | None
) -> list[list[torch.Tensor]]:
    """For each rank, its non-empty rows of the direct gradients and its packed row, flat, in the output's order."""
    rows: list[list[torch.Tensor]] = [[] for _ in range(plan.transport.world_size)]
    for i in plan.direct:
        full = plan.items[i].layout.padded_local_numel
        for rank, piece in enumerate(_direct_rows(plan, grads[i], None).split(full)):  # the last ranks may have none
            rows[rank].append(piece)
    if packed is not None:
        assert plan.packing is not None
        plan.packing.fill(packed, grads)
        for rank, piece in enumerate(packed.split_with_sizes(plan.packing.slots.sizes())):
            if piece.numel():
                rows[rank].append(piece)
    return rows


def _landing_rows(plan: ReducePlan, output: torch.Tensor) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """Where each peer's terms arrive (None for this rank), and the buffer behind them.

    See Note [Rank order]: in one dtype the first peer's terms arrive in the output.
    """
    numel, world = plan.output_numel, plan.transport.world_size
    landing: list[torch.Tensor | None] = [None] * world
    peers = [rank for rank in range(world) if rank != plan.rank]
    if plan.lands_in_output:
        landing[peers.pop(0)] = output
    if not peers or not numel:
        return landing, None
    staging = torch.empty(len(peers) * numel, dtype=plan.wire_dtype, device=output.device)
    note_allocated(staging, plan.label, "reduce_input")
    for rank, row in zip(peers, staging.split_with_sizes([numel] * len(peers)), strict=True):
        landing[rank] = row
    return landing, staging


def _sum(
    plan: ReducePlan,
    own: list[torch.Tensor],
    landing: Sequence[torch.Tensor | None],
    output: torch.Tensor,
    divisor: float | None,
) -> None:
    """Sum this rank's own terms and the landed ones into `output`, in rank order."""
    if not own:
        return
    terms = list(landing)
    if divisor is not None:
        own = list(foreach_div([term.to(plan.reduce_dtype) for term in own], divisor))
        terms = [row if row is None else row.to(plan.reduce_dtype).div_(divisor) for row in terms]
    outputs = output.split_with_sizes(plan.row_sizes)
    first = 1 if plan.rank == 0 else 0  # the first peer, whose term commutes with rank 0's own
    if not plan.lands_in_output:
        _add_term(outputs, output, own, terms[first], overwrite=True)
    for rank, term in enumerate(terms):
        if rank != first:
            _add_term(outputs, output, own, term, overwrite=False)


def _add_term(
    outputs: tuple[torch.Tensor, ...],
    output: torch.Tensor,
    own: list[torch.Tensor],
    landed: torch.Tensor | None,
    *,
    overwrite: bool,
) -> None:
    """Add one rank's term to `output`, or write it there: a landed row, or (None) this rank's own pieces."""
    if landed is not None:
        output.copy_(landed) if overwrite else output.add_(landed)
    elif overwrite:
        foreach_copy_(outputs, own)
    else:
        foreach_add_(outputs, own)


def _divide(tensor: torch.Tensor, divisor: float | None) -> None:
    if divisor is not None:
        tensor.div_(divisor)


def _described(plan: ReducePlan) -> tuple[str, tuple[str, ...], int, int, torch.dtype, dist.ProcessGroup]:
    return plan.label, plan.fqns, plan.nbytes, plan.wire_nbytes, plan.wire_dtype, plan.transport.group


def _announce(plan: ReducePlan) -> None:
    if events.hub.active:
        events.emit(events.ReduceStarted(*_described(plan), **details(plan)))


def _note_dropped(plan: ReducePlan, packed: torch.Tensor | None, staging: torch.Tensor | None) -> None:
    if packed is not None:
        note_freed(packed, plan.label, "packed")
    if staging is not None:
        note_freed(staging, plan.label, "reduce_input")
    note_let_go(plan.nbytes, plan.label)


def _conclude(plan: ReducePlan, launched: float) -> None:
    if events.hub.active:
        events.emit(events.ReduceFinished(*_described(plan), time.perf_counter() - launched, **details(plan)))
