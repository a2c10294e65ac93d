"""Sends and receives between each pair of ranks, directly from and into the tensors; for gloo on CPU.

gloo's own all-gather and reduce-scatter use internal buffers and run on a worker thread of the group. Its sends and
receives use the caller's memory and are driven by its socket thread.

Note [Rank order]: floating-point addition is not associative, so a sum in order of arrival would differ from run to
run. Where the owner sums (`Transport.sums_locally`), the terms are added in rank order: `((t0 + t1) + t2) + ...`.
Addition is commutative, so the first two terms may be swapped. The first peer's rows can therefore arrive directly in
the output if wire dtype and reduce dtype are the same.

Note [Tags]: gloo matches transfers of two ranks under one tag, in order. Each plan has its own tag, so ranks that run
different modules, or have gradients of different parameters, wait for each other until the timeout names the group.
Under a common tag they would exchange unrelated values.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardkit.core.runtime.collective import FlatTransport, flat_gradient
from shardkit.core.runtime.lanes import Reduction
from shardkit.core.runtime.packing import Slots
from shardkit.core.runtime.plan import Mean, ReducePlan
from shardkit.core.runtime.storage import note_allocated, note_freed
from shardkit.core.torch_compat import foreach_add_, foreach_copy_, foreach_div

__all__ = ["PairwiseTransport"]


class PairwiseTransport(FlatTransport):
    """In-place exchange between pairs. Sends only real elements: no padding, and nothing for an empty chunk.

    In round `k` every rank sends to the `k`-th rank after it and receives from the `k`-th rank before it, so no rank is
    the first peer of all others.
    """

    name = "pairwise"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        world = self.world_size
        self._rounds = tuple(((self.rank + k) % world, (self.rank - k) % world) for k in range(1, world))

    def all_gather(self, buffers: Sequence[torch.Tensor], slots: Sequence[Slots], tag: int) -> Sequence[dist.Work]:
        pieces = [buffer.split_with_sizes(slot.sizes()) for buffer, slot in zip(buffers, slots, strict=True)]
        own = [piece[self.rank] for piece in pieces if piece[self.rank].numel()]
        incoming = [[piece[rank] for piece in pieces if piece[rank].numel()] for rank in range(self.world_size)]
        return self._swap([own] * self.world_size, incoming, tag)

    def exchange(
        self, outgoing: torch.Tensor, sent: Sequence[int], incoming: torch.Tensor, received: Sequence[int], tag: int
    ) -> Sequence[dist.Work]:
        return self._swap(_parts(outgoing, sent), _parts(incoming, received), tag)

    def _swap(
        self, outgoing: Sequence[Sequence[torch.Tensor]], incoming: Sequence[Sequence[torch.Tensor]], tag: int
    ) -> Sequence[dist.Work]:
        """Sends `outgoing[peer]` to and receives `incoming[peer]` from every peer; this rank's entries are not used.

        The tensors that `a` sends to `b` must match those that `b` receives from `a`, one by one, in bytes. Tensors are
        contiguous and not empty. See Note [Tags].
        """
        group = self.group
        works: list[dist.Work] = []
        try:
            # Receives first: gloo starts a transfer when its receiver is ready.
            works.extend(group.recv([tensor], source, tag) for _, source in self._rounds for tensor in incoming[source])
            works.extend(group.send([tensor], target, tag) for target, _ in self._rounds for tensor in outgoing[target])
        except BaseException:
            for work in works:  # they write to memory that the caller frees next
                with contextlib.suppress(Exception):
                    work.wait()
            raise
        return works

    @torch.no_grad()
    def reduce(self, plan: ReducePlan, grads: list[torch.Tensor], mean: Mean) -> Reduction:
        packed = plan.pack(grads)
        outgoing = _rows_by_rank(plan, grads, packed)
        grads.clear()
        note_allocated(plan.direct_nbytes, plan.label, "gradient")
        return self._reduce(plan, outgoing, packed, mean.as_sum(self.world_size))

    @torch.no_grad()
    def _reduce(
        self, plan: ReducePlan, outgoing: list[list[torch.Tensor]], packed: torch.Tensor | None, mean: Mean
    ) -> Reduction:
        """Sends every row to its owner, receives the peers' terms of this rank's rows, and sums them in rank order."""
        launched = time.perf_counter()
        output = plan.allocate_output()
        landing, staging = _landing_rows(plan, output)
        incoming = [() if row is None else row.split_with_sizes(plan.row_sizes) for row in landing]
        with plan.reported(launched):
            try:
                yield self._swap(outgoing, incoming, plan.tag)
                _sum(plan, outgoing[plan.rank], landing, output, mean.before)
                if mean.after is not None:
                    output.div_(mean.after)
            finally:
                if packed is not None:
                    note_freed(packed, plan.label, "packed")
                if staging is not None:
                    note_freed(staging, plan.label, "reduce_input")
                note_freed(plan.direct_nbytes, plan.label, "gradient")
        return output


def _parts(buffer: torch.Tensor, sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    return [[part] if part.numel() else [] for part in buffer.split_with_sizes(list(sizes))]


def _rows_by_rank(
    plan: ReducePlan, grads: Sequence[torch.Tensor], packed: torch.Tensor | None
) -> list[list[torch.Tensor]]:
    """For each rank, its non-empty rows of the direct gradients and its packed row, flat, in the output's order."""
    rows: list[list[torch.Tensor]] = [[] for _ in range(plan.transport.world_size)]
    for i in plan.direct:
        layout = plan.items[i].layout
        sizes = [layout.local_numel(run.first) for run in layout.runs for _ in range(run.ranks)]
        for rank, piece in enumerate(flat_gradient(plan, grads[i], None).split_with_sizes(sizes)):
            if piece.numel():
                rows[rank].append(piece)
    if packed is not None:
        assert plan.packing is not None
        for rank, piece in enumerate(packed.split_with_sizes(plan.packing.slots.sizes())):
            if piece.numel():
                rows[rank].append(piece)
    return rows


def _landing_rows(plan: ReducePlan, output: torch.Tensor) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """The targets of each peer's terms (None for this rank), and their buffer.

    See Note [Rank order]: with a single dtype the first peer's terms arrive in the output.
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
