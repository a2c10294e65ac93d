"""Sends and receives between each pair of ranks, straight from and into the tensors; for gloo on CPU.

gloo's own all-gather and reduce-scatter go through buffers of their own and run on a worker thread of the group. Its
sends and receives read and write the caller's memory and are driven by its socket thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core.runtime.slots import Slots

# gloo matches what two ranks exchange under one tag in order. Users' tags are small; these are not.
_GATHER_TAG = 0x5AD0_0001
_EXCHANGE_TAG = 0x5AD0_0002


class PairwiseTransport:
    """In-place exchange between pairs. Only actual elements travel, no padding, and nothing for an empty chunk.

    In round `k` every rank sends to the `k`-th rank after it and receives from the `k`-th rank before it, so that no
    rank is everybody's first peer.
    """

    direct = True
    packs = True
    padded = False
    sums_locally = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = group.rank()
        self.world_size = group.size()
        world = self.world_size
        self._rounds = tuple(((self.rank + k) % world, (self.rank - k) % world) for k in range(1, world))

    def all_gather(self, buffers: Sequence[torch.Tensor], slots: Sequence[Slots]) -> Sequence[dist.Work]:
        group, rank = self.group, self.rank
        pieces = [buffer.split_with_sizes(slot.sizes()) for buffer, slot in zip(buffers, slots, strict=True)]
        own = [piece[rank] for piece in pieces if piece[rank].numel()]
        works: list[dist.Work] = []
        # Receives first: gloo starts a transfer when its receiver is ready.
        for _, source in self._rounds:
            for piece in pieces:
                if piece[source].numel():
                    works.append(group.recv([piece[source]], source, _GATHER_TAG))
        for target, _ in self._rounds:
            for tensor in own:
                works.append(group.send([tensor], target, _GATHER_TAG))
        return works

    def exchange(
        self, outgoing: Sequence[Sequence[torch.Tensor]], incoming: Sequence[Sequence[torch.Tensor]]
    ) -> Sequence[dist.Work]:
        group = self.group
        works: list[dist.Work] = []
        for _, source in self._rounds:
            for tensor in incoming[source]:
                works.append(group.recv([tensor], source, _EXCHANGE_TAG))
        for target, _ in self._rounds:
            for tensor in outgoing[target]:
                works.append(group.send([tensor], target, _EXCHANGE_TAG))
        return works

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any
    ) -> Sequence[dist.Work]:
        raise NotImplementedError("a pairwise transport exchanges gradients and sums them locally")

    def gather_buffer(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def reduce_buffer(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)
