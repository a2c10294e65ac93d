"""Values cut like a parameter (the parameter, its optimizer state), in the form of SHARDED state dicts, and back."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.torch_compat import local_of, new_dtensor
from shardkit.legacy_fsdp_compat.torch_compat import ShardedTensor, local_parts, new_sharded_tensor
from shardkit.legacy_fsdp_compat.units import Unit, UnitParameter

__all__ = ["from_sharded", "to_sharded"]


def to_sharded(
    unit: Unit, parameter: UnitParameter, value: torch.Tensor, *, as_dtensor: bool, offload: bool
) -> torch.Tensor:
    """The rank's rows of `value`, a DTensor cut like `parameter`, as a DTensor or ShardedTensor. Not collective.

    Replicated values (0-dim parameters) become plain tensors, as FSDP1 has no sharded form for them.
    """
    # A copy, as in stock, because training continues while a state dict is written.
    local = local_of(value).detach().to("cpu" if offload else local_of(value).device, copy=True)
    if parameter.is_replicated and not parameter.is_model_parallel:
        return local
    if as_dtensor or parameter.is_model_parallel:
        dtensor = cast(DTensor, parameter.like(local))
        mesh = unit.placement.user_mesh
        if mesh is None or parameter.is_model_parallel or mesh.ndim != dtensor.device_mesh.ndim:
            return dtensor
        return new_dtensor(local_of(dtensor), mesh, dtensor.placements, dtensor.shape)
    layout, rank = parameter.param.layout, unit.group.rank()
    rest = [0] * (len(parameter.shape) - 1)
    boxes = [
        ([layout.offset(one), *rest], list(layout.local_shape(one)))
        for one in range(layout.world_size)
        if layout.length(one)
    ]
    return cast(
        torch.Tensor,
        new_sharded_tensor(local, [layout.offset(rank), *rest], parameter.shape, boxes, unit.group),
    )


def from_sharded(unit: Unit, parameter: UnitParameter, value: object, name: str) -> torch.Tensor:
    """This rank's rows, from a value of a SHARDED state dict (collective for a DTensor that is cut differently).

    Raises:
        ValueError: if the value has another shape, or is sharded over other ranks.
        TypeError: if the value is not a tensor.
    """
    if isinstance(value, ShardedTensor):
        return _from_sharded_tensor(parameter, value, name)
    if isinstance(value, DTensor):
        _check_shape(parameter, value.shape, name)
        own = cast(DTensor, parameter.sharded)
        if tuple(value.placements) == tuple(own.placements) and value.device_mesh.shape == own.device_mesh.shape:
            return local_of(value).detach()
        return parameter.own_rows(value.full_tensor())
    if isinstance(value, torch.Tensor):  # whole, as distributed checkpoints store tensors of one element
        _check_shape(parameter, value.shape, name)
        return parameter.own_rows(value.detach())
    raise TypeError(
        f"'{name}' is a {type(value).__name__}, and SHARDED_STATE_DICT takes ShardedTensors or DTensors; set the "
        "StateDictType that it was saved with"
    )


def _from_sharded_tensor(parameter: UnitParameter, value: ShardedTensor, name: str) -> torch.Tensor:
    _check_shape(parameter, value.size(), name)
    layout = parameter.param.layout
    rank = parameter.param.mesh.shard_rank
    expected = layout.local_shape(rank)
    parts = local_parts(value)
    if not layout.length(rank) and not parts:
        return torch.empty(expected, dtype=value.dtype)
    if len(parts) == 1 and parts[0][0][0] == layout.offset(rank) and tuple(parts[0][1].shape) == expected:
        return parts[0][1].detach()
    seen = [(offsets, tuple(part.shape)) for offsets, part in parts]
    raise ValueError(
        f"'{name}' of shape {tuple(parameter.shape)} has on this rank the parts (offsets, shape) {seen}; expected one "
        f"at row {layout.offset(rank)} of shape {expected}, for {layout.world_size} ranks; load "
        "a checkpoint of another world size with torch.distributed.checkpoint into this model's own sharded state dict"
    )


def _check_shape(parameter: UnitParameter, shape: torch.Size, name: str) -> None:
    if tuple(shape) != tuple(parameter.shape):
        raise ValueError(
            f"'{name}' has shape {tuple(shape)}, the model expects {tuple(parameter.shape)}; "
            "load it into the model that saved it"
        )
