"""Memory that the ranks of one host map from each other; for gloo on CPU when nobody is elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardkit.core.runtime.shared.neighbours import Channel, Neighbours
from shardkit.core.runtime.shared.outbox import Outbox, Parcel
from shardkit.core.runtime.shared.posting import Posting
from shardkit.core.runtime.shared.tables import Table

if TYPE_CHECKING:
    from shardkit.core.runtime.plan import GatherPlan
    from shardkit.core.runtime.shared.gather import GatherBinding


class SharedTransport:
    """Lends shards where they are, and sends copies of everything else through an outbox.

    `bindings` are what gathers have prepared for the tensors that a plan was last used with.
    """

    direct = True
    packs = False
    padded = False
    sums_locally = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, neighbours: Neighbours) -> None:
        self.group = group
        self.device = device
        self.rank = group.rank()
        self.world_size = group.size()
        self.outbox = Outbox(neighbours)
        self.bindings: WeakKeyDictionary[GatherPlan, GatherBinding] = WeakKeyDictionary()
        self._neighbours = neighbours
        self._lent: list[Posting] = []

    def lend(self, table: Table) -> Posting:
        """Lets the peers read this rank's shards."""
        posting = Posting(self._neighbours, Channel.GATHER, table)
        self._lent.append(posting)
        return posting

    def send(self, parcel: Parcel, table: Table, channel: Channel) -> Posting:
        """Lets the peers read a parcel."""
        posting = Posting(self._neighbours, channel, table)
        parcel.operation = posting.operation
        return posting

    def settle(self) -> None:
        """Waits until the peers have read what this rank has lent, in operations that are over for this rank.

        Raises:
            RuntimeError: if a peer is gone, or does not come, with the name of the group that it was to read.
        """
        unfinished = []
        while self._lent:
            posting = self._lent.pop()
            if posting.released:
                posting.wait_released()
            else:
                unfinished.append(posting)
        self._lent = unfinished

    def gather_buffer(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def reduce_buffer(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)
