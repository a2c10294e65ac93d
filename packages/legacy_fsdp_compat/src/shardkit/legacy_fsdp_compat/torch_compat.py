"""All private names of torch that this package uses; checked on torch 2.13.

ShardedTensor and the activation-checkpoint wrapper are part of FSDP1's file format and of its names, but torch keeps
both in private modules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_wrapper_subclass
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as ShardedTensorPart
from torch.distributed._shard.sharding_spec.api import _infer_sharding_spec_from_shards_metadata
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "CHECKPOINT_PREFIX",
    "PickledShards",
    "ShardedTensor",
    "StorageInfo",
    "allow_any_grad_dtype",
    "called_by_checkpoint",
    "checkpoint_wrapped",
    "detailed_debugging",
    "flatten_for_checkpoint",
    "local_parts",
    "new_sharded_tensor",
    "ranks_of_mesh",
    "unscale_and_check_",
]

CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."
"""The activation-checkpoint wrapper adds this prefix to names; its own hooks remove it from state dicts."""


def checkpoint_wrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside an activation-checkpoint wrapper; any other module itself."""
    if isinstance(module, ActivationWrapper):
        inner: torch.nn.Module = module._checkpoint_wrapped_module
        return inner
    return module


def called_by_checkpoint() -> bool:
    """Whether the caller's caller is in torch.distributed.checkpoint.state_dict.

    It uses `named_parameters()` for the names of a state dict, and cleans them only for stock's FSDP class.
    """
    return sys._getframe(2).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


def new_sharded_tensor(
    local: torch.Tensor,
    offset: Sequence[int],
    shape: torch.Size,
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]],
    group: dist.ProcessGroup,
) -> ShardedTensor:
    """A ShardedTensor over this rank's `local` at `offset`; no communication.

    Args:
        local: this rank's part; if it is empty, no part is recorded.
        offset: where it starts, one number for each dim.
        shape: shape of the whole tensor.
        boxes: (offsets, sizes) of the parts of the first `len(boxes)` ranks, the ones with elements.
        group: the process group.
    """
    kind = local.device.type
    devices = [
        f"{kind}:{rank % torch.get_device_module(kind).device_count()}" if kind != "cpu" else kind
        for rank in range(len(boxes))
    ]
    metadata = ShardedTensorMetadata(
        shards_metadata=[
            ShardMetadata(list(offsets), list(sizes), f"rank:{dist.get_global_rank(group, rank)}/{devices[rank]}")
            for rank, (offsets, sizes) in enumerate(boxes)
        ],
        size=shape,
        tensor_properties=TensorProperties(
            dtype=local.dtype,
            layout=torch.strided,
            requires_grad=False,
            memory_format=torch.contiguous_format,
            pin_memory=False,
        ),
    )
    parts = []
    if group.rank() < len(boxes):
        parts.append(ShardedTensorPart.from_tensor_and_offsets(local, list(offset), dist.get_rank()))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        parts, sharded_tensor_metadata=metadata, process_group=group
    )


@dataclass(frozen=True)
class PickledShards:
    """Pickles as the CPU ShardedTensor that one rank of a process group would write, without the group.

    Attributes:
        local: the rank's rows; None if it has none.
        shape: shape of the whole tensor.
        dtype: its dtype.
        boxes: (offsets, sizes) of the parts of the first `len(boxes)` ranks, the ones with elements.
        rank, world_size: rank and world size of the process group.
        requires_grad: the recorded `requires_grad` of `local` and the whole.
    """

    local: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]]
    rank: int
    world_size: int
    requires_grad: bool = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        described = [
            ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/cpu")
            for rank, (offsets, sizes) in enumerate(self.boxes)
        ]
        parts = [] if self.local is None else [ShardedTensorPart(self.local, described[self.rank])]
        properties = TensorProperties(self.dtype, requires_grad=self.requires_grad)
        metadata = ShardedTensorMetadata(described, self.shape, properties)
        group = ShardedTensor.ProcessGroupState(self.rank, self.rank, self.world_size, self.world_size)
        state = (parts, metadata, group, _infer_sharding_spec_from_shards_metadata(described), False)
        stride = torch.empty(self.shape, device="meta").stride()
        empty = (ShardedTensor, self.dtype, tuple(self.shape), stride, 0, torch.strided, torch.device("cpu"))
        return _rebuild_from_type_v2, (_rebuild_wrapper_subclass, ShardedTensor, (*empty, self.requires_grad), state)


def ranks_of_mesh(mesh: DeviceMesh) -> tuple[torch.Tensor, int] | None:
    """The global ranks of a mesh in a file, as its writer has them, and the writer's rank; None if that rank is outside
    the mesh. `mesh.mesh` of a slice would need a process group, which does not exist.
    """
    root = mesh._get_root_mesh()
    place = root.get_coordinate()
    if place is None or mesh.get_coordinate() is None:
        return None
    rank = int(root.mesh[*place])
    (ranks,) = [one for one in mesh._layout.remap_to_tensor(mesh._rank_map) if bool((one == rank).any())]
    return ranks, rank


def detailed_debugging() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG=DETAIL is set, which asks stock FSDP1 to check the order of execution."""
    level: Any = torch.distributed
    return bool(level.get_debug_level() == level.DebugLevel.DETAIL)


def local_parts(tensor: ShardedTensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """This rank's parts of a ShardedTensor: offsets and values."""
    return [(tuple(part.metadata.shard_offsets), part.tensor) for part in tensor.local_shards()]


def allow_any_grad_dtype(parameter: torch.Tensor) -> None:
    """Lets `parameter.grad` have another dtype than the parameter."""
    parameter.grad_dtype = None


def unscale_and_check_(gradients: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiplies gradients of one device and dtype by `inv_scale`, in place; sets `found_inf` to 1 for inf or nan."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)


def flatten_for_checkpoint(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The flat keys that torch.distributed.checkpoint gives nested state, and the path that each stands for."""
    flat, paths = flatten_state_dict(state_dict)
    return dict(flat), dict(paths)
