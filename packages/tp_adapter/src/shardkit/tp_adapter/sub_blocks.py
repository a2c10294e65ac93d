"""Fused weights: a parameter that is several logical tensors, stacked on one dim (SwiGLU's gate and up, packed QKV).

Note [Fused weights]
A fused weight is computed with as if it were one tensor, so tensor parallelism has to give every rank its part of each
logical tensor: rows 0-1 and 4-5 of

    gate 0 1 2 3 | up 4 5 6 7

on the first of two ranks. The module's own DTensor says Shard(0) of that local tensor, which is right for computing:
the outputs of a rank are its part of gate and its part of up. In the whole parameter the same rows are a strided shard,
and that is what the sharded parameter, its gradient and its optimizer state say. So `full_tensor()`, a full state dict
and a checkpoint have the fused weight in its own order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from shardkit.core.adapters import Holder
from shardkit.tp_adapter.placing import cuts
from shardkit.tp_adapter.torch_compat import StridedShard

__all__ = ["SubBlocks", "check_sub_blocks", "declare_sub_blocks", "placements_in_whole", "sub_blocks_of"]

_DECLARED = "_shardkit_sub_blocks"
"""Attribute of a module: SubBlocks of its fused parameters, by name. A note on a parameter itself would get lost, as
`module.to()` and `load_state_dict(assign=True)` put another tensor in its place."""


@dataclass(frozen=True)
class SubBlocks:
    """The logical tensors that a parameter is made of, all of one size, stacked on `dim`."""

    names: tuple[str, ...]
    dim: int = 0


def check_sub_blocks(parameter: torch.Tensor, described: str, sub_blocks: SubBlocks) -> None:
    """Raises if a parameter, `described` in messages, cannot be such a stack.

    Raises:
        ValueError: if the dim cannot be cut into so many equal parts.
    """
    names, dim = sub_blocks.names, sub_blocks.dim
    if not names or not 0 <= dim < parameter.ndim or parameter.shape[dim] % len(names):
        raise ValueError(
            f"{described} of shape {tuple(parameter.shape)} is not {len(names)} logical tensors {names} of one size "
            f"stacked on dim {dim}. Keep logical tensors of different sizes as parameters of their own, or, for "
            "queries that share keys and values, pack them group by group (the queries of a group, its key, its value) "
            "under ColwiseParallel, which gives every rank whole groups"
        )


def declare_sub_blocks(module: nn.Module, name: str, sub_blocks: SubBlocks) -> None:
    """Notes on a module that its DTensor parameter `name` is fused, before `fully_shard`, which reads the note.

    Each rank's local tensor must hold its part of every logical tensor, in order, while the placements say Shard:
    that is what `FusedColwiseParallel` makes. The note stays when the module is moved, cast, or loaded into.

    Raises:
        AttributeError: if the module has no such parameter.
        ValueError: as `check_sub_blocks`.
    """
    check_sub_blocks(module.get_parameter(name), f"'{type(module).__name__}.{name}'", sub_blocks)
    module.__dict__[_DECLARED] = {**module.__dict__.get(_DECLARED, {}), name: sub_blocks}


def sub_blocks_of(holders: Iterable[Holder]) -> SubBlocks | None:
    """What `declare_sub_blocks` noted of a parameter on one of the modules that hold it."""
    for module, name in holders:
        blocks = module.__dict__.get(_DECLARED, {}).get(name)
        if isinstance(blocks, SubBlocks):
            return blocks
    return None


def placements_in_whole(parameter: DTensor, blocks: SubBlocks, fqn: str) -> tuple[Placement, ...]:
    """Where the local tensor of a fused parameter lies in the whole one: see Note [Fused weights].

    Raises:
        ValueError: if the ranks do not divide each logical tensor, so that placements could not tell them apart.
    """
    ranks = 1
    placements: list[Placement] = []
    for axis, placement in enumerate(parameter.placements):
        if cuts(placement, blocks.dim):
            ranks *= parameter.device_mesh.size(axis)
            parts = getattr(placement, "split_factor", 1) * len(blocks.names)
            placement = StridedShard(blocks.dim, split_factor=parts)
        placements.append(placement)
    length = parameter.shape[blocks.dim] // len(blocks.names)
    if length % ranks:
        raise ValueError(
            f"parameter '{fqn}' with placements {tuple(parameter.placements)} is made of {blocks.names}, of {length} "
            f"each on dim {blocks.dim}, which {ranks} ranks do not divide"
        )
    return tuple(placements)
