"""How a parameter group's bytes are to travel, as its user has set it: a value; a setting makes a new one."""

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
    """What is to be used instead of the transports that the process groups suggest. Labels are for messages.

    Attributes:
        compression: how parameters and gradients are rounded to travel, None for full precision.
        all_gather: custom communication, with buffers of its own; None for ours.
        reduce_scatter: likewise.
        reduce_group: where reductions run; it has the ranks of the shard group. None: on the shard group itself.
    """

    compression: CompressionPolicy | None = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    reduce_group: dist.ProcessGroup | None = None

    def gathering_through(self, comm: AllGather, label: str) -> Communication:
        """Gathers go through `comm` and its buffers."""
        self._refuse_compression(type(comm).__name__, label)
        return replace(self, all_gather=comm)

    def reducing_through(self, comm: ReduceScatter, label: str) -> Communication:
        """Reduce-scatters go through `comm` and its buffers."""
        self._refuse_compression(type(comm).__name__, label)
        return replace(self, reduce_scatter=comm)

    def reducing_on(self, group: dist.ProcessGroup | None) -> Communication:
        """Reductions run on `group`; None: on the shard group."""
        return replace(self, reduce_group=group)

    def with_buffers_of(self, group: dist.ProcessGroup | None, label: str) -> Communication:
        """Communication buffers come from the allocator of `group`; None: they are ours again.

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
        """What moves the bytes over the shard group `group` (collective over it the first time: its ranks meet)."""
        return choose_transports(
            group, self.reduce_group, device, self.all_gather, self.reduce_scatter, self.compression, label
        )
