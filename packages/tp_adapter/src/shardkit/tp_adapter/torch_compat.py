"""All private names of torch in this package, and names that differ between its versions; checked on torch 2.13.

The rest of the package uses torch's public names, and those of shardkit.core's `torch_compat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardedTensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as ShardedTensorShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _dtensor_spec, _sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = [
    "FALLS_BACK",
    "KEEPS_READING",
    "ShardedTensor",
    "ShardedTensorShard",
    "StridedShard",
    "arrived_local_of",
    "concatenated",
    "group_of",
    "no_torch_function",
    "over_memory_of",
    "root_of",
    "sharded_tensor",
    "wrapper_of",
]

_T = TypeVar("_T", bound=torch.Tensor)

StridedShard: Any = _StridedShard
"""`StridedShard(dim, split_factor=n)` cuts a dim into n parts and takes its chunk of each part."""

FALLS_BACK = hasattr(_dtensor_spec, "_StridedShardNotDecodableError")
"""Whether a tensor whose strided placement matches no order of cuts is gathered axis by axis; torch 2.11 refuses it."""
KEEPS_READING = hasattr(_sharding_prop, "_propagate_use_strided_shard_flag")
"""Whether what operators return reads strided placements as their argument did; in torch 2.11 as an order of cuts."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""As `__torch_function__` of a tensor subclass: functions of torch treat it as any tensor."""


def concatenated(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh whose axes are those of `meshes`, in this order; they must stem from one root. Not collective.

    Raises:
        RuntimeError, AssertionError: for meshes of several roots, overlapping ones, or axes without names.
    """
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(list(meshes))


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh was sliced from, or itself."""
    return mesh._get_root_mesh()


def arrived_local_of(dtensor: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, without autograd, once the communication that fills it is done."""
    local = dtensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def over_memory_of(cls: type[_T], tensor: torch.Tensor) -> _T:
    """A tensor subclass object over the memory of `tensor`, without autograd."""
    return torch.Tensor._make_subclass(cls, tensor.detach())


def wrapper_of(cls: type[_T], shape: torch.Size, like: torch.Tensor) -> _T:
    """A tensor subclass object without memory: contiguous, of a shape, with the dtype and device of `like`."""
    stride = torch.empty(shape, device="meta").stride()
    return torch.Tensor._make_wrapper_subclass(cls, shape, stride, dtype=like.dtype, device=like.device)


def group_of(tensor: ShardedTensor) -> dist.ProcessGroup:
    """The process group that a ShardedTensor lies on."""
    return tensor._process_group


def sharded_tensor(
    pieces: Sequence[tuple[Sequence[int], Sequence[int], int]],
    shape: torch.Size,
    like: torch.Tensor,
    local: torch.Tensor | None,
    group: dist.ProcessGroup,
) -> ShardedTensor:
    """A ShardedTensor of `shape` over `group`, made of pieces (offsets, sizes, global rank). Not collective.

    `local` is this rank's piece, a ShardedTensor or a plain tensor; None if it has none. dtype and device are those of
    the plain tensor `like`.
    """
    placements = [f"rank:{rank}/{like.device}" for _, _, rank in pieces]
    shards = [
        ShardMetadata(list(offsets), list(sizes), placement)
        for (offsets, sizes, _), placement in zip(pieces, placements, strict=True)
    ]
    mine = [shard for shard, (_, _, rank) in zip(shards, pieces, strict=True) if rank == dist.get_rank()]
    properties = ShardedTensorProperties(dtype=like.dtype, layout=like.layout, requires_grad=False)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [ShardedTensorShard(local, mine[0])] if local is not None else [],
        sharded_tensor_metadata=ShardedTensorMetadata(shards, shape, properties),
        process_group=group,
        init_rrefs=False,
    )
