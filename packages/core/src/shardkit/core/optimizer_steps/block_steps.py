"""Steps on plain shards of optimizers with 8-bit or 4-bit state: bitsandbytes' and torchao's.

A block of consecutive elements, which starts with the shard, has one scale. torchao keeps values and scales in a tensor
subclass of the parameter's shape, which cannot be cut inside a block; on our placements they are separate entries
between the steps (`exp_avg.codes`, `exp_avg.scale`). bitsandbytes keeps scales in `absmax1` and `absmax2`. Where no
block crosses from one rank to the next, scales are cut like the parameter, as DTensors, and checkpoints load them on
any number of ranks. Otherwise a checkpoint would silently mix them up, so those parameters are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from shardkit.core.parameters.param import fqn_of
from shardkit.core.parameters.placements import Blocks, Owned, is_ours
from shardkit.core.parameters.region import region_at
from shardkit.core.torch_compat import like_dtensor, local_of, new_dtensor

# bitsandbytes' names of algorithms. "lamb" and "lars" need norms of whole parameters; "ademamix" has state of twice the
# parameter's shape.
_BITSANDBYTES = {"adagrad", "adam", "lion", "momentum", "rmsprop"}
_BLOCK = 256  # elements with one scale, in every 8-bit optimizer of bitsandbytes

_SCALES = {"absmax1", "absmax2"}
_TABLES = {"qmap1", "qmap2"}
_CUT_PARTS = (".codes", ".scale")  # torchao's; 4-bit codes lie two in a byte
_TABLE_PARTS = (".qmap",)


def steps_by_block(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each update is known to depend only on a block of consecutive elements; subclasses may do anything."""
    package = type(optimizer).__module__.split(".")[0]
    if package == "bitsandbytes":
        args = getattr(optimizer, "args", None)
        return getattr(optimizer, "optimizer_name", None) in _BITSANDBYTES and not getattr(args, "max_unorm", 0.0)
    return package == "torchao" and any(kind.__name__ == "_AdamBase" for kind in type(optimizer).__mro__)


def in_blocks(key: str, value: Any, parameter: DTensor) -> Any:
    """State of bitsandbytes that has a layout of its own: scales become a DTensor cut like the parameter."""
    if key in _TABLES:
        return value
    return _one_for_each(_BLOCK, value, parameter) if key in _SCALES else None


def _one_for_each(block: int, value: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    placements = _placements_of_scales(parameter, block)
    if placements is None:
        return value
    total = torch.Size((-(-parameter.numel() // block),))
    return new_dtensor(value, parameter.device_mesh, placements, total, kind=type(parameter))


def inner_tensors(value: Any) -> dict[str, torch.Tensor] | None:
    """The tensors in a tensor of torchao's, values and scales; None for anything else."""
    if not type(value).__module__.startswith("torchao."):
        return None
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}


def parts_of(key: str, value: Any, parameter: DTensor) -> dict[str, Any] | None:
    """The quantized state of torchao on our placements, as an entry for each tensor; None for other state."""
    inner = inner_tensors(value)
    if inner is None or not any(is_ours(one) for one in parameter.placements):
        return None
    owned, local = any(isinstance(one, Owned) for one in parameter.placements), local_of(parameter)
    parts: dict[str, Any] = {}
    for name, part in inner.items():
        if name == "qmap" or (owned and part.shape != local.shape):
            parts[f"{key}.{name}"] = part
        elif part.shape == local.shape:
            parts[f"{key}.{name}"] = like_dtensor(part, parameter)
        else:
            parts[f"{key}.{name}"] = _one_for_each(local.numel() // part.numel(), part, parameter)
            if parts[f"{key}.{name}"] is part:  # its blocks differ from ours
                return None
    return parts


def join_parts(
    optimizer: Any, state: dict[str, Any], plain: torch.Tensor, joined: Mapping[str, torch.Tensor]
) -> list[str]:
    """Replaces the entries of `parts_of` in plain state by torchao's tensors; returns the keys of those made anew.

    `joined` are those of earlier steps, by the same keys; they are taken again if they still have these parts.
    """
    fresh: list[str] = []
    if not hasattr(optimizer, "_new_buffer"):
        return fresh
    for key in [key.removesuffix(".codes") for key in state if key.endswith(".codes")]:
        known = inner_tensors(joined.get(key)) or {}
        if known and all(state.get(f"{key}.{name}") is part for name, part in known.items()):
            for name in known:
                del state[f"{key}.{name}"]
            state[key] = joined[key]
            continue
        made = optimizer._new_buffer(plain, key == "exp_avg")
        names, rest = made.__tensor_flatten__()
        parts = {name: state.pop(f"{key}.{name}") for name in names}
        if parts["scale"].dtype != made.scale.dtype:
            raise RuntimeError(
                f"load_state_dict has cast the scales of {key}, of a parameter of shape {tuple(plain.shape)}, from "
                f"{made.scale.dtype} to {parts['scale'].dtype}; load them with CheckpointManager"
            )
        whole = {name: part.to(getattr(made, name)).view_as(getattr(made, name)) for name, part in parts.items()}
        state[key] = type(made).__tensor_unflatten__({**whole, "qmap": made.qmap} if "qmap" in whole else whole, rest)
        fresh.append(key)
    return fresh


def target_by_block(
    key: str, dtype: torch.dtype, shape: tuple[int, ...], parameter: torch.Tensor
) -> torch.Tensor | None:
    """A new tensor for reading block state, laid out as after a step; None for any other state."""
    if not isinstance(parameter, DTensor) or len(shape) != 1 or not shape[0]:
        return None
    if key in _TABLES or key.endswith(_TABLE_PARTS):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    cut = key in _SCALES or key.endswith(_CUT_PARTS)
    placements = _placements_of_scales(parameter, -(-parameter.numel() // shape[0])) if cut else None
    if placements is None:
        return None
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, key
    mine = region_at(key, shape, placements, mesh.mesh.shape, coordinate).shape
    local = torch.zeros(mine, dtype=dtype, device=local_of(parameter).device)
    return new_dtensor(local, mesh, placements, torch.Size(shape), kind=type(parameter))


def check_blocks(optimizer: torch.optim.Optimizer, parameter: DTensor) -> None:
    """Refuses a parameter whose bitsandbytes blocks would cross from one rank's shard to the next, on all ranks."""
    args = getattr(optimizer, "args", None)
    owned = any(isinstance(one, Owned) for one in parameter.placements)
    if getattr(args, "optim_bits", None) != 8 or owned or not parameter.requires_grad:
        return
    smallest = getattr(args, "min_8bit_size", 0)  # fewer elements get 32-bit state
    if _placements_of_scales(parameter, _BLOCK) is not None or _largest_shard(parameter) < smallest:
        return
    raise RuntimeError(
        f"parameter '{fqn_of(parameter)}' of shape {tuple(parameter.shape)} with placements "
        f"{tuple(parameter.placements)} is cut into shards that are not whole blocks of {_BLOCK} elements, which "
        f"{type(optimizer).__name__} quantises together. Shard it with Blocks(elements=4096) "
        "or Owned() (docs/how-to/placements.md), or raise min_8bit_size "
        f"above {_largest_shard(parameter)}"
    )


def carry_overrides(optimizer: torch.optim.Optimizer, plain: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Applies bitsandbytes' overrides for single parameters, which it finds by identity, to their plain tensors."""
    manager = getattr(optimizer, "mng", None)
    settings = getattr(manager, "pid2config", None)
    if manager is None or settings is None:
        return
    for module, name, config in manager.module_weight_config_triple:
        settings.setdefault(id(getattr(module, name)), config)
    if settings:
        settings.update({id(one): settings[id(parameter)] for parameter, one in plain if id(parameter) in settings})


def _placements_of_scales(parameter: DTensor, block: int) -> list[Placement] | None:
    """Placements of a 1-D tensor with one number per block, None if blocks cross from one rank's shard to the next."""
    placements: list[Placement] = []
    shards = 1
    for axis, one in enumerate(parameter.placements):
        if isinstance(one, Blocks):
            size = one.elements or one.rows * parameter.numel() // max(1, parameter.shape[0])  # type: ignore[operator]
            if size % block:
                return None
            one = Blocks(elements=size // block)
        elif type(one) is Shard and one.dim == 0:
            shards *= parameter.device_mesh.size(axis)
        elif not one.is_replicate():
            return None
        placements.append(one)
    even = parameter.numel() % (block * shards) == 0 and (parameter.ndim > 0 and parameter.shape[0] % shards == 0)
    return placements if shards == 1 or even else None


def _largest_shard(parameter: DTensor) -> int:
    """An upper bound if several axes of the mesh cut the parameter."""
    largest = parameter.numel()
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard) and parameter.shape[placement.dim]:
            rows = parameter.shape[placement.dim]
            largest = largest // rows * -(-rows // parameter.device_mesh.size(axis))
    return largest
