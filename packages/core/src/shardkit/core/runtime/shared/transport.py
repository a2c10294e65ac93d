"""Gathers and reductions among ranks of one host, through shared memory.

In a gather each rank copies its peers' shards into its own unsharded tensors. Shards in shared memory are read in place
and cast on the way; nothing is allocated, and each element is copied once. If one shard of a group is not in shared
memory, all of the group's are copied to the outbox first. A peer may read a shard until it has reported that it is
done; `SharedTransport.wait_until_read` waits for that, before the owner may change the shard.

In a reduction each rank copies the rows of its gradients that peers own to its outbox, so that the gradients can be
freed at once. It then adds up its own rows from the outboxes of its peers, in rank order (`plan.py`, Note [Rank
order]). This rank's own terms wait in the output.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from operator import is_
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardkit.core.runtime.lanes import Program, Reduction
from shardkit.core.runtime.plan import GatherPlan, Mean, ReducePlan, Transport, report_allocated, report_freed, reported
from shardkit.core.runtime.shared.neighbours import Gradients, Neighbours, Posting, Table
from shardkit.core.runtime.shared.segment import ALIGNMENT, Segment, aligned, carve, locate
from shardkit.core.torch_compat import foreach_copy_

Specs: TypeAlias = tuple[tuple[int, torch.dtype], ...]
"""Elements and dtype of each tensor of a parcel."""

# Groups share parcels, and parameters used at random create new sets of gradients.
_MOST_CUTS = 256


class Parcel:
    """One segment, divided for its users; each division has a table, which is sent once."""

    def __init__(self, nbytes: int) -> None:
        self.memory = Segment(nbytes)
        self.posting: Posting | None = None  # the last one of it
        self._cuts: dict[tuple[str, Specs, Gradients], tuple[list[torch.Tensor], Table]] = {}

    def cut(self, label: str, specs: Specs, gradients: Gradients) -> tuple[list[torch.Tensor], Table]:
        """1-D tensors as in `specs`, one after the other, and the table that lists them."""
        known = self._cuts.get((label, specs, gradients))
        if known is None:
            if len(self._cuts) >= _MOST_CUTS:
                self._cuts.clear()
            tensors, offset = [], 0
            for numel, dtype in specs:
                tensors.append(carve(self.memory, offset, (numel,), dtype))
                offset += aligned(numel * dtype.itemsize)
            known = self._cuts[label, specs, gradients] = tensors, Table(label, tensors, gradients)
        return known


class GatherBinding:
    """A plan with the tensors that it was last used with: the views to copy from and to, created once."""

    # `table` lists the shards where they are; None if one of them is not in shared memory.
    def __init__(self, plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> None:
        self.sources = list(sources)
        self.flats = list(flats)
        self._addresses = [source.data_ptr() for source in sources]
        in_shared_memory = all(not source.numel() or (source.is_contiguous() and locate(source)) for source in sources)
        self.table = Table(plan.label, sources) if in_shared_memory else None
        layouts = [item.layout for item in plan.items]
        wholes = [flat[: layout.numel].view(layout.shape) for flat, layout in zip(flats, layouts, strict=True)]
        # Each rank's part of each unsharded tensor, whichever dim is cut; the last ranks may have none.
        self._slots = [
            whole.split_with_sizes(layout.lengths(), layout.dim) for whole, layout in zip(wholes, layouts, strict=True)
        ]
        self._peers: list[list[torch.Tensor] | None] = []
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def matches(self, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same tensor objects, over the same memory (pickling moves a tensor, `set_` may)."""
        known, seen = [*self.sources, *self.flats], [*sources, *flats]
        same = len(known) == len(seen) and all(map(is_, known, seen))
        return same and self._addresses == [source.data_ptr() for source in sources]

    def copies(
        self, plan: GatherPlan, peers: list[list[torch.Tensor] | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The copies to make: source and target of every rank's non-empty chunk of every item."""
        if self._peers and all(map(is_, self._peers, peers)):
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
                        f"{item.layout.local_numel(rank)}; build the same model on all ranks"
                    )
                targets.append(self._slots[i][rank])
                chunks.append(chunk.view(shape))
        self._peers, self._copies = peers, (targets, chunks)
        return self._copies


class SharedTransport(Transport):
    """Lets peers read shards in place, and sends copies of everything else through an outbox."""

    name = "shared"
    peers_read_shards = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, neighbours: Neighbours) -> None:
        super().__init__(group, device)
        self._outbox: list[Parcel] = []  # kept between steps
        self._neighbours = neighbours
        self._bindings: WeakKeyDictionary[GatherPlan, GatherBinding] = WeakKeyDictionary()
        self._read_by_peers: list[Posting] = []

    def _parcel(self, specs: Specs, label: str) -> Parcel:
        """A parcel with room for `specs`, contents undefined. The caller posts it before it asks for the next one.

        If none that all peers have read is large enough, those are freed first.
        """
        nbytes = sum(aligned(numel * dtype.itemsize) for numel, dtype in specs) or ALIGNMENT
        idle = [parcel for parcel in self._outbox if parcel.posting is None or parcel.posting.is_read()]
        fitting = [parcel for parcel in idle if parcel.memory.nbytes >= nbytes]
        if fitting:
            return min(fitting, key=lambda one: one.memory.nbytes)
        for parcel in idle:
            self._outbox.remove(parcel)
            report_freed(parcel.memory.nbytes, label, "outbox")
        parcel = Parcel(nbytes)
        self._outbox.append(parcel)
        report_allocated(parcel.memory.nbytes, label, "outbox")
        return parcel

    def wait_until_read(self) -> None:
        for posting in [one for one in self._read_by_peers if one.released]:
            try:
                posting.wait_until_read()
            except RuntimeError:  # a peer is gone or late. After any other error (Ctrl-C) peers may still read
                self._read_by_peers.remove(posting)
                raise
            self._read_by_peers.remove(posting)

    def gather(self, plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
        launched = time.perf_counter()
        binding = self._bindings.get(plan)
        if binding is None or not binding.matches(sources, flats):
            binding = GatherBinding(plan, sources, flats)
            if binding.table is not None:  # else the sources are new for each gather, and must not be kept alive
                self._bindings[plan] = binding
        if binding.table is not None:
            posting = self._neighbours.post(binding.table)
            self._read_by_peers.append(posting)
        else:
            posting = self._post_copies(plan, sources)
        try:
            with reported(plan, launched):
                yield (posting,)
                targets, chunks = binding.copies(plan, posting.peers)
                if targets:
                    foreach_copy_(targets, chunks)
        finally:
            posting.release()

    def _post_copies(self, plan: GatherPlan, sources: Sequence[torch.Tensor]) -> Posting:
        specs = tuple((source.numel(), item.dtype) for source, item in zip(sources, plan.items, strict=True))
        parcel = self._parcel(specs, plan.label)
        tensors, table = parcel.cut(plan.label, specs, ())
        filled = [(tensor, source) for tensor, source in zip(tensors, sources, strict=True) if source.numel()]
        if filled:
            foreach_copy_([tensor.view(source.shape) for tensor, source in filled], [source for _, source in filled])
        parcel.posting = self._neighbours.post(table)
        return parcel.posting

    def reduce(self, plan: ReducePlan, grads: list[torch.Tensor], mean: Mean) -> Reduction:
        launched, mean = time.perf_counter(), mean.as_sum(self.world_size)
        output = plan.allocate_output()
        report_allocated(plan.nbytes, plan.label, "gradient")
        posting = self._post_rows(plan, grads, output)
        grads.clear()
        report_freed(plan.nbytes, plan.label, "gradient")
        try:
            with reported(plan, launched):
                yield (posting,)
                if output.numel():
                    earlier, later = posting.peers[: plan.rank], posting.peers[plan.rank + 1 :]
                    mean.add_up(output, _terms(plan, earlier), _terms(plan, later))
        finally:
            posting.release()
        return output

    def _post_rows(self, plan: ReducePlan, grads: list[torch.Tensor], output: torch.Tensor) -> Posting:
        """Copies the peers' rows to the outbox, in `wire_dtype`, and this rank's own to the output."""
        specs = tuple(
            (0 if rank == plan.rank else numel, plan.wire_dtype) for rank, numel in enumerate(plan.row_numels)
        )
        parcel = self._parcel(specs, plan.label)
        rows, table = parcel.cut(plan.label, specs, tuple(zip(plan.members, plan.fqns, strict=True)))
        rows = [output if rank == plan.rank else row for rank, row in enumerate(rows)]
        targets: list[torch.Tensor] = []
        chunks: list[torch.Tensor] = []
        pieces = [row.split_with_sizes(sizes) for row, sizes in zip(rows, plan.piece_sizes, strict=True)]
        for i, (item, grad) in enumerate(zip(plan.items, grads, strict=True)):
            for rank, chunk in enumerate(grad.split_with_sizes(plan.lengths[i], item.layout.dim)):
                if chunk.numel():
                    targets.append(pieces[rank][i].view(chunk.shape))
                    chunks.append(chunk)
        if targets:
            foreach_copy_(targets, chunks)
        parcel.posting = self._neighbours.post(table)
        return parcel.posting


def _terms(plan: ReducePlan, peers: Sequence[list[torch.Tensor] | None]) -> Iterator[torch.Tensor]:
    """The peers' rows, which may be changed in place: they may be the peers' own memory, which nobody else reads."""
    for tensors in peers:
        assert tensors is not None and tensors[plan.rank].numel() == plan.output_numel, plan.label
        yield tensors[plan.rank].to(plan.reduce_dtype)
