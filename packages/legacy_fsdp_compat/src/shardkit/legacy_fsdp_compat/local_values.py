"""LOCAL state dicts: a unit's parameters as this rank's part of FSDP1's flat parameter, both ways."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardkit.core.torch_compat import local_of
from shardkit.legacy_fsdp_compat.flat_layout import PADDING_VALUE
from shardkit.legacy_fsdp_compat.reshuffle import reshuffle
from shardkit.legacy_fsdp_compat.torch_compat import ShardedTensor, local_parts, new_sharded_tensor
from shardkit.legacy_fsdp_compat.units import Unit, UnitParameter

__all__ = ["flat_shard", "from_flat", "to_flat"]


def flat_shard(unit: Unit) -> torch.Tensor:
    """This rank's part of the flat parameter, 1-D, with padding inside but none at its end (collective)."""
    layout, rank = unit.layout, unit.group.rank()
    start, stop = layout.shard(rank)
    first = local_of(unit.parameters[0].sharded)
    shard = torch.full((stop - start,), PADDING_VALUE, dtype=first.dtype, device=first.device)
    for index, parameter in enumerate(unit.parameters):
        low, high = layout.within_shard(index, rank)
        shard[low:high] = _to_pieces(unit, index, parameter)
    return shard


def _to_pieces(unit: Unit, index: int, parameter: UnitParameter) -> torch.Tensor:
    local = local_of(parameter.sharded).detach().contiguous().view(-1)
    if parameter.is_replicated:
        low, high = unit.layout.piece(index, unit.group.rank())
        return local[low:high]
    return reshuffle(local, parameter.rows, unit.layout.pieces(index), unit.group)


def to_flat(unit: Unit, *, offload: bool) -> ShardedTensor:
    """The unit's entry of a LOCAL state dict: a 1-D ShardedTensor whose parts are the ranks' (collective)."""
    layout, shard = unit.layout, flat_shard(unit)
    boxes = [
        ([layout.shard(rank)[0]], [stop - start])
        for rank in range(layout.world_size)
        if (start := layout.shard(rank)[0]) < (stop := layout.shard(rank)[1])
    ]
    return new_sharded_tensor(
        shard.cpu() if offload else shard,
        [layout.shard(unit.group.rank())[0]],
        torch.Size([layout.numel]),
        boxes,
        unit.group,
    )


def local_views(unit: Unit, shard: torch.Tensor) -> dict[str, torch.Tensor]:
    """With use_orig_params=True stock lists each parameter's 1-D piece, even if empty, beside the flat parameter."""
    rank = unit.group.rank()
    return {
        name: shard[slice(*unit.layout.within_shard(index, rank))]
        for index, parameter in enumerate(unit.parameters)
        for name in parameter.aliases
    }


def from_flat(unit: Unit, value: object, name: str) -> list[torch.Tensor]:
    """This rank's rows of every parameter of the unit, from its entry of a LOCAL state dict (collective).

    Raises:
        RuntimeError: on every rank, if the value of any rank is not a ShardedTensor, or has another length or another
            part than its own, as with another world size or wrapping.
    """
    problems: list[str | None] = [None] * unit.group.size()
    dist.all_gather_object(problems, _problem(unit, value, name), group=unit.group)
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise RuntimeError(f"rank {rank} of the shard group: {problem}")
    assert isinstance(value, ShardedTensor)
    parts = local_parts(value)
    device = local_of(unit.parameters[0].sharded).device
    shard = parts[0][1].detach().to(device) if parts else torch.empty(0, dtype=value.dtype, device=device)
    return [_from_pieces(unit, index, parameter, shard) for index, parameter in enumerate(unit.parameters)]


def _problem(unit: Unit, value: object, name: str) -> str | None:
    """The reason why a value cannot be this unit's flat tensor."""
    if value is None:
        return (
            f"the LOCAL state dict has no '{name}', but the FSDP module there has parameters "
            f"{[one.name for one in unit.parameters]}; was it saved with another wrapping, or as another type?"
        )
    if not isinstance(value, ShardedTensor):
        return f"'{name}' is a {type(value).__name__}; LOCAL_STATE_DICT takes ShardedTensors"
    layout, parts = unit.layout, local_parts(value)
    start, stop = layout.shard(unit.group.rank())
    seen = parts[0][0][0] if parts else start, parts[0][1].numel() if parts else 0
    if value.size().numel() == layout.numel and ((stop == start and not parts) or seen == (start, stop - start)):
        return None
    return (
        f"'{name}' has {value.size().numel()} elements and on this rank {seen[1]} from {seen[0]} on; this FSDP "
        f"module has {layout.numel} and {stop - start} from {start} on. A LOCAL state dict loads into the same "
        f"wrapping and use_orig_params on as many ranks only, here {layout.world_size}; migrate it instead"
    )


def _from_pieces(unit: Unit, index: int, parameter: UnitParameter, shard: torch.Tensor) -> torch.Tensor:
    layout, rank = unit.layout, unit.group.rank()
    low, high = layout.within_shard(index, rank)
    piece = shard[low:high].contiguous()
    wanted = parameter.rows
    if parameter.is_replicated:
        numel = parameter.shape.numel()
        wanted = tuple((0, numel) for _ in range(layout.world_size))
    return reshuffle(piece, layout.pieces(index), wanted, unit.group).view(parameter.param.local_shape)
