"""Fused weights under the names of their logical tensors: `logical_state_dict`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.parameters.region import Region, Run, region_of
from shardkit.core.torch_compat import local_of
from shardkit.tp_adapter.boxes import BoxedTensor, Boxes
from shardkit.tp_adapter.declared import Declared, declared_of
from shardkit.tp_adapter.logical_tensor import LogicalTensor
from shardkit.tp_adapter.sub_blocks import SubBlocks

__all__ = ["logical_state_dict"]

# Modules that wrap one other module, as they appear in the names of a plain state dict.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class _Fused:
    """A fused parameter: its logical tensors, and its whole shape."""

    declared: Declared
    shape: torch.Size

    @property
    def blocks(self) -> SubBlocks:
        return self.declared.blocks


def logical_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in which each fused weight is replaced by its logical tensors, by name. Not collective.

    A logical name replaces the module's: with gate and up in it, `mlp.gate_up.weight` becomes `mlp.gate.weight` and
    `mlp.up.weight`. The entries are views: `torch.distributed.checkpoint.save` writes the memory of `state_dict`, and
    `load` fills it, whatever mesh wrote the checkpoint. Other entries are unchanged. Logical tensors of a plain tensor
    are plain if they are contiguous parts; for weights packed group by group they are `LogicalTensor`s, whose `whole()`
    copies one.

    Args:
        model: the sharded model; its modules know which parameters are fused.
        state_dict: `model.state_dict()`, or the result of `get_model_state_dict(model)` or
            `get_optimizer_state_dict(model, optimizer)` of torch.distributed.checkpoint.state_dict: sharded or full
            (plain tensors), with optimizer states nested or flattened.

    Raises:
        ValueError: if a logical name is taken by another entry; if a tensor's shape differs from the fused parameter's,
            such as a factored optimizer state; and for a stack that tensor parallelism has cut and fully_shard has not
            seen.
    """
    fused = dict(_fused_parameters(model))
    if set(state_dict) == {"state", "param_groups"}:
        states = _renamed(state_dict["state"], fused)
        groups = [{**group, "params": _names(group["params"], fused)} for group in state_dict["param_groups"]]
        return {"state": states, "param_groups": groups}
    return _renamed(state_dict, fused)


def _fused_parameters(model: nn.Module) -> Iterator[tuple[str, _Fused]]:
    """Every name of a fused parameter, without wrappers; a tied one has several names, and a note on one module."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters[id(parameter)] = parameter
                holders.setdefault(id(parameter), []).append((module, name))
                names.setdefault(id(parameter), []).append(_unwrapped(f"{path}.{name}" if path else name))
    for key, parameter in parameters.items():
        if (declared := declared_of(holders[key])) is not None:
            yield from ((name, _Fused(declared, parameter.shape)) for name in names[key])


def _unwrapped(fqn: str) -> str:
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def _names(fqns: list[str], fused: Mapping[str, _Fused]) -> list[str]:
    return [name for fqn in fqns for name in _Entry.of(fqn, fused).names()]


@dataclass(frozen=True)
class _Entry:
    """A key of a state dict: a parameter's name, or one between a prefix and a suffix.

    The second kind occurs in flattened optimizer state dicts, such as `state.mlp.gate_up.weight.exp_avg` and
    `param_groups.mlp.gate_up.weight.lr`.
    """

    key: str
    prefix: str = ""
    fqn: str = ""
    suffix: str = ""
    fused: _Fused | None = None

    @classmethod
    def of(cls, key: str, fused: Mapping[str, _Fused]) -> _Entry:
        """The entry of `key`; its `fused` is None if it belongs to no fused parameter."""
        if (found := fused.get(_unwrapped(key))) is not None:
            return cls(key, "", key, "", found)
        for prefix in ("state.", "param_groups."):
            fqn, _, last = key.removeprefix(prefix).rpartition(".")
            if key.startswith(prefix) and (found := fused.get(_unwrapped(fqn))) is not None:
                return cls(key, prefix, fqn, f".{last}", found)
        return cls(key)

    def names(self) -> list[str]:
        """The names that replace the key: one for each logical tensor."""
        if self.fused is None:
            return [self.key]
        *path, attribute = self.fqn.split(".")
        while path and path[-1] in _WRAPPERS:
            path.pop()
        above = path[:-1]
        return [self.prefix + ".".join([*above, name, attribute]) + self.suffix for name in self.fused.blocks.names]


def _renamed(entries: Mapping[str, Any], fused: Mapping[str, _Fused]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for key, value in entries.items():
        entry = _Entry.of(key, fused)
        for number, name in enumerate(entry.names()):
            if name in renamed or (name != key and name in entries):
                raise ValueError(
                    f"'{key}' would be saved as '{name}', but the state dict has such an entry already; rename one"
                )
            renamed[name] = value if entry.fused is None else _part(key, value, entry.fused, number)
    return renamed


def _part(fqn: str, value: Any, fused: _Fused, number: int) -> Any:
    """One logical tensor of a fused tensor, or of each fused tensor among an optimizer's states of a parameter."""
    if isinstance(value, dict):
        return {key: _part(f"{fqn}.{key}", one, fused, number) for key, one in value.items()}
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value  # for example, an optimizer's step count, which the logical tensors share
    blocks = fused.blocks
    if value.shape != fused.shape:
        raise ValueError(
            f"'{fqn}' has shape {tuple(value.shape)}, but the fused parameter {tuple(fused.shape)}, made of "
            f"{blocks.names}: only tensors of its shape can be taken apart. Save this state dict under the fused names"
        )
    runs = blocks.runs(number, fused.shape[blocks.dim])
    if not isinstance(value, DTensor) and len(runs) == 1:
        start, stop = runs[0]
        return value.detach().narrow(blocks.dim, start, stop - start)
    if isinstance(value, DTensor):
        fused.declared.check_placed(value, fqn)
    local = local_of(value) if isinstance(value, DTensor) else value
    plain = local.plain() if isinstance(local, BoxedTensor) else local.detach()
    return logical_part(plain, region_of(fqn, value), fused.shape, blocks, number)


def logical_part(
    plain: torch.Tensor, region: Region, shape: Sequence[int], blocks: SubBlocks, number: int
) -> LogicalTensor:
    """The rank's part of one logical tensor, as a view of its part of the fused tensor.

    Args:
        plain: the rank's tensor.
        region: where it lies in the fused tensor.
        shape: shape of the fused tensor.
        blocks: the logical tensors of the fused tensor.
        number: index of the logical tensor.
    """
    dim, runs = blocks.dim, blocks.runs(number, shape[blocks.dim])
    common = list(_common(region.runs[dim], runs))
    part = Region((*region.runs[:dim], tuple(run for run, _ in common), *region.runs[dim + 1 :]))
    length = sum(stop - start for start, stop in runs)
    boxes = Boxes(torch.Size((*shape[:dim], length, *shape[dim + 1 :])), part)
    if not part.numel:
        return LogicalTensor.of(plain.new_empty(part.shape), boxes)
    places = [place for _, place in common]
    if all(stop == start for (_, stop), (start, _) in itertools.pairwise(places)):
        return LogicalTensor.of(plain.narrow(dim, places[0][0], part.shape[dim]), boxes)
    packed = [_packed(one) for one in region.runs]
    held = Region((*packed[:dim], tuple(places), *packed[dim + 1 :]))
    return LogicalTensor.of(plain, replace(boxes, places=held))


def _common(held: Sequence[Run], wanted: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """The common parts of two lists of runs: their positions in `wanted` and in `held`, each packed without gaps."""
    before = 0
    for start, stop in held:
        after = 0
        for low, high in wanted:
            first, last = max(start, low), min(stop, high)
            if first < last:
                yield (after + first - low, after + last - low), (before + first - start, before + last - start)
            after += high - low
        before += stop - start


def _packed(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs in a tensor that packs them one after the other."""
    ends = itertools.accumulate(stop - start for start, stop in runs)
    return tuple((end - (stop - start), end) for end, (start, stop) in zip(ends, runs, strict=True))
