"""Fused weights under the names of the logical tensors that they are made of: `logical_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.region import Region, Run, region_of
from shardkit.core.torch_compat import local_of
from shardkit.tp_adapter.boxes import BoxedTensor, Boxes
from shardkit.tp_adapter.sub_blocks import SubBlocks, sub_blocks_of

__all__ = ["LogicalTensor", "logical_state_dict"]


class LogicalTensor(BoxedTensor):
    """This rank's part of one logical tensor: a view of the fused parameter's (or optimizer state's) memory.

    For `torch.distributed.checkpoint` it is a tensor of the logical tensor's whole size.
    """

    def size(self, dim: int | None = None) -> Any:
        """The size of the whole logical tensor, which `dcp.load` compares with the checkpoint's."""
        return self.boxes.shape if dim is None else self.boxes.shape[dim]


def logical_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in which each fused weight stands under the names of its logical tensors. Not collective.

    The names take the place of the module's: `mlp.gate_up.weight`, made of gate and up, becomes `mlp.gate.weight` and
    `mlp.up.weight`. The entries are views, so `torch.distributed.checkpoint.save` writes the memory of `state_dict`
    and `load` fills it, whatever the mesh that the checkpoint was written on; other entries are passed on as they are.

    Args:
        model: sharded; its parameters know which of them are fused.
        state_dict: `model.state_dict()`, or what `get_optimizer_state_dict(model, optimizer)` of
            torch.distributed.checkpoint.state_dict gives.

    Raises:
        ValueError: if a logical name is taken by another entry.
    """
    fused = {name: blocks for name, parameter in model.named_parameters() if (blocks := sub_blocks_of(parameter))}
    if set(state_dict) == {"state", "param_groups"}:
        states = _renamed(state_dict["state"], fused)
        groups = [{**group, "params": _names(group["params"], fused)} for group in state_dict["param_groups"]]
        return {"state": states, "param_groups": groups}
    return _renamed(state_dict, fused)


def _names(fqns: list[str], fused: Mapping[str, SubBlocks]) -> list[str]:
    return [name for fqn in fqns for name in (_logical_names(fqn, fused[fqn]) if fqn in fused else [fqn])]


def _renamed(entries: Mapping[str, Any], fused: Mapping[str, SubBlocks]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for fqn, value in entries.items():
        blocks = fused.get(fqn)
        names = [fqn] if blocks is None else _logical_names(fqn, blocks)
        for number, name in enumerate(names):
            if name in renamed or (name != fqn and name in entries):
                raise ValueError(f"'{fqn}' would be saved as '{name}', but the state dict has such an entry already")
            renamed[name] = value if blocks is None else _part(fqn, value, blocks, number)
    return renamed


def _logical_names(fqn: str, blocks: SubBlocks) -> list[str]:
    path, _, attribute = fqn.rpartition(".")
    above = path.rpartition(".")[0]
    return [".".join(filter(None, (above, name, attribute))) for name in blocks.names]


def _part(fqn: str, value: Any, blocks: SubBlocks, number: int) -> Any:
    """One logical tensor of a fused one, or of each fused tensor among an optimizer's states of a parameter."""
    if isinstance(value, dict):
        return {key: _part(fqn, one, blocks, number) for key, one in value.items()}
    if not isinstance(value, DTensor) or not value.ndim:
        return value  # such as an optimizer's count of steps, which the logical tensors share
    dim, length = blocks.dim, value.shape[blocks.dim] // len(blocks.names)
    low, high = number * length, (number + 1) * length
    region = region_of(fqn, value)
    before = sum(min(stop, low) - min(start, low) for start, stop in region.runs[dim])
    runs: tuple[Run, ...] = tuple(
        (max(start, low) - low, min(stop, high) - low)
        for start, stop in region.runs[dim]
        if max(start, low) < min(stop, high)
    )
    part = Region((*region.runs[:dim], runs, *region.runs[dim + 1 :]))
    local = local_of(value)
    plain = local.plain() if isinstance(local, BoxedTensor) else local.detach()
    count = sum(stop - start for start, stop in runs) if plain.numel() else 0
    view = plain.narrow(dim, min(before, plain.shape[dim]), count)
    shape = torch.Size((*value.shape[:dim], length, *value.shape[dim + 1 :]))
    return LogicalTensor.of(view, Boxes(shape, part))
