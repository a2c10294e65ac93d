"""The all-gather among ranks of one host: each copies its peers' shards into its own unsharded tensors.

Shards that lie in shared memory are read from where they are, cast on the way; nothing is allocated and nothing is
copied but the elements themselves, once. If one of a group's does not, all of them are copied to the outbox first.

A peer may read a shard until it has said that it is done; `SharedTransport.settle` waits for that, before whoever owns
the shard may change it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from shardkit.core import events
from shardkit.core.runtime.details import details
from shardkit.core.runtime.plan import GatherPlan
from shardkit.core.runtime.program import Program
from shardkit.core.runtime.shared.neighbours import Channel
from shardkit.core.runtime.shared.posting import Posting
from shardkit.core.runtime.shared.segment import locate
from shardkit.core.runtime.shared.tables import Table
from shardkit.core.runtime.transport.shared import SharedTransport
from shardkit.core.torch_compat import foreach_copy_


class GatherBinding:
    """A plan with the tensors that it was last used with: the views to copy from and to, made once."""

    # `table` lists the shards where they are; None if one of them does not lie in shared memory.
    def __init__(self, plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> None:
        self.sources = list(sources)
        self.flats = list(flats)
        self._addresses = [source.data_ptr() for source in sources]
        lent = all(not source.numel() or (source.is_contiguous() and locate(source)) for source in sources)
        self.table = Table(plan.label, sources) if lent else None
        self._slots = [_slots(plan, flat, i) for i, flat in enumerate(flats)]
        self._peers: list[list[torch.Tensor] | None] = []
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def matches(self, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same tensor objects, over the same memory (pickling moves a tensor, `set_` may)."""
        same = _same(self.sources, sources) and _same(self.flats, flats)
        return same and self._addresses == [source.data_ptr() for source in sources]

    def copies(
        self, plan: GatherPlan, peers: list[list[torch.Tensor] | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What to copy to what: every rank's non-empty chunk of every item."""
        if self._peers and all(one is other for one, other in zip(self._peers, peers, strict=True)):
            return self._copies
        targets: list[torch.Tensor] = []
        chunks: list[torch.Tensor] = []
        for rank, tensors in enumerate(peers):
            for i, item in enumerate(plan.items):
                shape = item.layout.local_shape(rank)
                if not item.layout.local_numel(rank):
                    continue
                chunk = self.sources[i] if tensors is None else tensors[i]
                if chunk.numel() != item.layout.local_numel(rank):
                    raise ValueError(
                        f"rank {rank} of the group shares {chunk.numel()} elements of '{item.fqn}', expected "
                        f"{item.layout.local_numel(rank)}"
                    )
                targets.append(self._slots[i][rank])
                chunks.append(chunk.view(shape))
        self._peers, self._copies = peers, (targets, chunks)
        return self._copies


def _same(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(map(lambda one, other: one is other, these, those))


def _slots(plan: GatherPlan, flat: torch.Tensor, i: int) -> tuple[torch.Tensor, ...]:
    """Each rank's part of an unsharded tensor, on whatever dim it is cut; the last ranks may have none."""
    layout = plan.items[i].layout
    parts: tuple[torch.Tensor, ...] = flat[: layout.numel].view(layout.shape).split(layout.chunk, layout.dim)
    return parts


def _send_copies(plan: GatherPlan, transport: SharedTransport, sources: Sequence[torch.Tensor]) -> Posting:
    specs = tuple((source.numel(), item.dtype) for source, item in zip(sources, plan.items, strict=True))
    parcel = transport.outbox.parcel(specs, plan.label)
    tensors, table = parcel.cut(plan.label, specs)
    filled = [(tensor, source) for tensor, source in zip(tensors, sources, strict=True) if source.numel()]
    if filled:
        foreach_copy_([tensor.view(source.shape) for tensor, source in filled], [source for _, source in filled])
    return transport.send(parcel, table, Channel.GATHER)


@torch.no_grad()
def shared_gather(plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
    """The program that gathers `plan`'s items, as `runtime.gather.gather` says."""
    launched = time.perf_counter()
    transport = plan.transport
    assert isinstance(transport, SharedTransport)
    binding = transport.bindings.get(plan)
    if binding is None or not binding.matches(sources, flats):
        binding = GatherBinding(plan, sources, flats)
        if binding.table is not None:  # else the sources are made anew for each gather, and are not to be kept
            transport.bindings[plan] = binding
    posting = transport.lend(binding.table) if binding.table is not None else _send_copies(plan, transport, sources)
    described = (plan.label, plan.fqns, plan.nbytes, plan.wire_nbytes, plan.dtype, transport.group)
    try:
        if events.hub.active:
            events.emit(events.GatherStarted(*described, **details(plan)))
        yield (posting,)
        targets, chunks = binding.copies(plan, posting.peers)
        if targets:
            foreach_copy_(targets, chunks)
    finally:
        posting.release()
    if events.hub.active:
        events.emit(events.GatherFinished(*described, time.perf_counter() - launched, **details(plan)))
