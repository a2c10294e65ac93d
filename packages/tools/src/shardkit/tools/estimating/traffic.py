"""What a simulated rank sends, by module, and over which links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

Collective: TypeAlias = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "other"]


@dataclass(frozen=True)
class Transfer:
    """One communication of this rank.

    Attributes:
        collective: what kind it is.
        fqn: the parameter group's label, or the module that ran for communication of the model's own.
        phase: forward, backward, optimizer or between.
        bytes: of the full tensors that are gathered or reduced.
        wire_bytes: what this rank sends; `inside` of them to ranks of its own host, the others between hosts.
        dtype: on the wire.
        ranks: how many take part.
        hosts: how many hosts they are on.
        of_core: whether `fully_shard` made it.
        compressed: whether a `CompressionPolicy` rounds what travels.
    """

    collective: Collective
    fqn: str
    phase: str
    bytes: int
    wire_bytes: int
    inside: int
    dtype: torch.dtype
    ranks: int
    hosts: int
    of_core: bool
    compressed: bool = False

    @property
    def moved(self) -> int:
        """`bytes` as they travel: fewer if they are rounded for the way."""
        if not self.compressed:
            return self.bytes
        return self.wire_bytes * self.ranks // max(1, self.ranks - 1)

    @property
    def between(self) -> int:
        """Bytes that this rank sends to other hosts."""
        return self.wire_bytes - self.inside


@dataclass(frozen=True)
class Neighbourhood:
    """The ranks of a process group, as this rank sees them.

    Attributes:
        ranks: how many there are.
        local: which places in the group are other ranks of this rank's host.
        hosts: how many hosts they are on.
    """

    ranks: int
    local: frozenset[int]
    hosts: int

    @property
    def local_share(self) -> float:
        """The part of this rank's peers that are on its host."""
        return len(self.local) / max(1, self.ranks - 1)

    def inside(self, to_peers: Sequence[int]) -> int:
        """What stays inside the host of the bytes that go to each place of the group."""
        return sum(to_peers[place] for place in self.local)


@lru_cache(maxsize=256)
def neighbourhood(group: dist.ProcessGroup, ranks_per_host: int) -> Neighbourhood:
    """Which ranks of a group share this rank's host, where hosts hold consecutive ranks."""
    ranks = dist.get_process_group_ranks(group)
    here, own = dist.get_rank() // ranks_per_host, dist.get_rank()
    local = frozenset(i for i, rank in enumerate(ranks) if rank // ranks_per_host == here and rank != own)
    return Neighbourhood(len(ranks), local, len({rank // ranks_per_host for rank in ranks}))
