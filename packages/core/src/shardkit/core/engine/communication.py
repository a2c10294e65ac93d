"""A user's communication settings for a parameter group, as an immutable value."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from shardkit.core.policies import AllGather, CompressionPolicy, ReduceScatter
from shardkit.core.runtime.choice import Transports, choose_transports
from shardkit.core.runtime.custom import ProcessGroupAllocatedAllGather, ProcessGroupAllocatedReduceScatter

__all__ = ["Communication"]

_OURS = (ProcessGroupAllocatedAllGather, ProcessGroupAllocatedReduceScatter)


@dataclass(frozen=True)
class Communication:
    """Overrides of the transports that are chosen for the process groups. Labels are for messages.

    Attributes:
        compression: how parameters and gradients are rounded when sent, None for full precision.
        all_gather: custom communication, with its own buffers; None for ours.
        reduce_scatter: likewise.
        reduce_group: process group for reductions, with the ranks of the shard group. None: the shard group itself.
    """

    compression: CompressionPolicy | None = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    reduce_group: dist.ProcessGroup | None = None

    def gathering_through(self, comm: AllGather, label: str) -> Communication:
        """Sends gathers through `comm` and its buffers."""
        self._refuse_compression(type(comm).__name__, label)
        return replace(self, all_gather=comm)

    def reducing_through(self, comm: ReduceScatter, label: str) -> Communication:
        """Sends reduce-scatters through `comm` and its buffers."""
        self._refuse_compression(type(comm).__name__, label)
        return replace(self, reduce_scatter=comm)

    def reducing_on(self, group: dist.ProcessGroup | None) -> Communication:
        """Runs reductions on `group`; None: on the shard group."""
        return replace(self, reduce_group=group)

    def with_buffers_of(self, group: dist.ProcessGroup | None, label: str) -> Communication:
        """Takes communication buffers from the allocator of `group`; None: from ours again.

        Raises:
            ValueError: if custom communication is set, or the process group has no allocator.
        """
        for comm in (self.all_gather, self.reduce_scatter):
            if comm is not None and not isinstance(comm, _OURS):
                raise ValueError(
                    f"group '{label}' has custom communication ({type(comm).__name__}), which brings its own buffers"
                )
        if group is None:
            return replace(self, all_gather=None, reduce_scatter=None)
        self._refuse_compression("buffers of the process group", label)
        return replace(
            self,
            all_gather=ProcessGroupAllocatedAllGather(group),
            reduce_scatter=ProcessGroupAllocatedReduceScatter(group),
        )

    def _refuse_compression(self, name: str, label: str) -> None:
        if self.compression is not None:
            raise ValueError(
                f"group '{label}' has a {self.compression}, which makes rows of bytes of its own and cannot go "
                f"through {name}; shard it without compression_policy"
            )

    def transports(self, group: dist.ProcessGroup | None, device: torch.device, label: str) -> Transports:
        """The transports over the shard group `group` (collective over it the first time: its ranks meet)."""
        return choose_transports(
            group, self.reduce_group, device, self.all_gather, self.reduce_scatter, self.compression, label
        )
