"""A user's settings for a parameter group, as immutable values; among them, how its bytes are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core.mesh import PostForwardMesh
from shardkit.core.policies import AllGather, CompressionPolicy, MixedPrecisionPolicy, ReduceScatter
from shardkit.core.runtime.choice import Transports, transport_for
from shardkit.core.runtime.custom import CustomTransport
from shardkit.core.runtime.memory import require_memory
from shardkit.core.runtime.plan import Transport

__all__ = ["Communication", "GroupSettings"]


@dataclass(frozen=True)
class Communication:
    """Overrides of the transports that are chosen for the process groups. Labels are for messages.

    Attributes:
        compression: how parameters and gradients are rounded when sent, None for full precision.
        all_gather: custom communication, with its own buffers; None for ours.
        reduce_scatter: likewise.
        reduce_group: process group for reductions, with the ranks of the shard group. None: the shard group itself.
        registered: whether communicated memory is registered with the process group (runtime/memory.py).
    """

    compression: CompressionPolicy | None = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    reduce_group: dist.ProcessGroup | None = None
    registered: bool = False

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

    def in_registered_memory(
        self, enable: bool, group: dist.ProcessGroup, device: torch.device, label: str
    ) -> Communication:
        """Sets whether memory that the shard group `group` communicates is registered with it.

        Raises:
            ValueError: if custom communication is set, or the process group has no allocator.
        """
        for comm in (self.all_gather, self.reduce_scatter):
            if comm is not None:
                raise ValueError(
                    f"group '{label}' has custom communication ({type(comm).__name__}), which brings its own buffers; "
                    "use either of the two"
                )
        if enable:
            self._refuse_compression("memory of the process group", label)
            if group.size() > 1:
                require_memory(group, device, label)
        return replace(self, registered=enable)

    def _refuse_compression(self, name: str, label: str) -> None:
        if self.compression is not None:
            raise ValueError(
                f"group '{label}' has a {self.compression}, which makes rows of bytes of its own and cannot go "
                f"through {name}; shard it without compression_policy"
            )

    def transports(self, group: dist.ProcessGroup | None, device: torch.device, label: str) -> Transports:
        """The transports over the shard group `group` (collective over it the first time: its ranks meet).

        Raises:
            RuntimeError: if the ranks do not meet; the message has the label.
        """
        if group is None or group.size() == 1:
            return Transports(None, None)
        over = self.reduce_group or group
        try:
            if self.all_gather is not None:
                gather: Transport = CustomTransport(group, device, self.all_gather)
            else:
                gather = transport_for(group, device, self.registered)
            if self.reduce_scatter is not None:
                reduce: Transport = CustomTransport(over, device, reduce_scatter=self.reduce_scatter)
            else:
                reduce = transport_for(over, device, self.registered)
        except (OSError, RuntimeError) as error:  # a missing peer causes a timeout, of a socket or of gloo
            raise RuntimeError(
                f"{label}: set-up failed (meeting the other ranks of its group): {error}; "
                "check that every rank runs this forward"
            ) from error
        if self.compression is not None and self.compression.gather is not None:
            gather = gather.compressing(self.compression)
        if self.compression is not None and self.compression.reduce is not None:
            reduce = reduce.compressing(self.compression)
        return Transports(gather, reduce)


@dataclass(frozen=True)
class GroupSettings:
    """See the methods of `FSDPModule` with these names.

    Attributes:
        reshard_after_forward: whether forward frees the parameters.
        mp_policy: dtypes of compute and reduction.
        post_forward_mesh: the subgroup that holds the parameters between forward and backward, or None.
        communication: how its bytes are sent, from the next gather on, and with the reductions after it.
        keep_unsharded_storage: whether resharding keeps the unsharded storage's memory, so its addresses never change.
        reduce_grads: whether backward reduces gradients; if not, they accumulate unsharded.
        all_reduce_grads: HSDP: whether backward all-reduces over replicas; if not, reduce-scattered ones accumulate.
        max_reduce_inputs: number of groups whose unsharded gradients may be in reduction at once.
        gradient_divide_factor: divisor of gradient sums, None for the number of data-parallel ranks.
        force_sum_reduction: collectives only sum, and every division is a separate operation.
        native_all_reduce: False if `all_reduce_hook` itself combines replicas.
        all_reduce_hook: runs on flat reduced gradients, in place, on `all_reduce_hook_stream` if there is one.
    """

    reshard_after_forward: bool
    mp_policy: MixedPrecisionPolicy
    post_forward_mesh: PostForwardMesh | None
    communication: Communication
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_unsharded_storage: bool = False
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reduce_unused_params: bool = False
    max_reduce_inputs: int = 1
    gradient_divide_factor: float | None = None
    force_sum_reduction: bool = False
    native_all_reduce: bool = True
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: Any = None
