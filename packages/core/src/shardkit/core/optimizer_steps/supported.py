"""Which optimizers may step on plain tensors, and on which parameters.

An optimizer of torch that updates each element by itself may step on any shard, and one that updates blocks of elements
on whole blocks. Any other sees plain tensors of parameters on `Owned` only: whole matrices. It sees those of its rank
alone, so it may neither combine parameters nor communicate, and nothing in its class shows whether it does:
`separate_optimizers.json` has the names of classes for which this was tried.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.optimizer_steps.block_steps import steps_by_block
from shardkit.core.parameters.param import fqn_of
from shardkit.core.parameters.placed import PlacedTensor
from shardkit.core.parameters.placements import Blocks, Owned, is_ours
from shardkit.core.parameters.region import regions_of_mesh

ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

# Optimizers of torch that have foreach operators, and base classes of others.
_TAKES_LISTS = (*ELEMENTWISE, torch.optim.Adafactor)


def steps_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's that update each element separately; not true of subclasses."""
    return type(optimizer) in ELEMENTWISE


def plain_parameters(optimizer: torch.optim.Optimizer, *, all_shards: bool) -> list[DTensor]:
    """The parameters that the optimizer is to see as plain tensors; with `all_shards`, all DTensors.

    Raises RuntimeError, with an FQN and a remedy, if the optimizer would be wrong on plain tensors.
    """
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_element = steps_by_element(optimizer)
    on_any_part = by_element or steps_by_block(optimizer)
    placed = [one for one in params if isinstance(one, PlacedTensor)]
    owned = [one for one in placed if _is_on(one, Owned)]
    plain: list[DTensor] = [one for one in placed if _is_on(one, Owned) or (on_any_part and _is_on(one, Blocks))]
    if all_shards or (by_element and (plain or _lists_several_meshes(optimizer))):
        plain = [one for one in params if isinstance(one, DTensor)]
    if not plain:
        return plain
    _refuse_mixed_lists(optimizer, plain)
    _refuse_joined_steps(optimizer, owned)
    return plain


def steps_on_empty(optimizer: torch.optim.Optimizer, parameter: DTensor) -> bool:
    """Whether it steps on empty tensors: torch's do, so that all ranks have state, as stock's loading requires."""
    ours = any(map(is_ours, parameter.placements))
    return not ours or steps_by_element(optimizer) or type(optimizer) is torch.optim.Muon


def lacks_state_somewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some rank has no state for a parameter, because others hold all of it."""
    for one in (one for group in optimizer.param_groups for one in group["params"] if isinstance(one, PlacedTensor)):
        if not steps_on_empty(optimizer, one) and (_is_on(one, Owned) or steps_by_block(optimizer)):
            regions = regions_of_mesh("", one.shape, one.placements, one.device_mesh.mesh.shape)
            if any(not region.numel for region in regions):
                return True
    return False


def _is_on(parameter: PlacedTensor, placement: type[Owned | Blocks]) -> bool:
    return any(isinstance(one, placement) for one in parameter.placements)


def _lists_several_meshes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a list for a foreach or fused operator would have parameters of several meshes, or plain ones as well."""
    meshes = (
        {id(getattr(parameter, "device_mesh", None)) for parameter in group["params"]}
        for group in optimizer.param_groups
        if group.get("foreach") or group.get("fused")
    )
    return any(len(each) > 1 for each in meshes)


def _refuse_mixed_lists(optimizer: torch.optim.Optimizer, plain: Sequence[DTensor]) -> None:
    if not isinstance(optimizer, _TAKES_LISTS):
        return
    known = set(map(id, plain))
    for group in optimizer.param_groups:
        mine = next((one for one in group["params"] if id(one) in known), None)
        rest = next((one for one in group["params"] if isinstance(one, DTensor) and id(one) not in known), None)
        if mine is not None and rest is not None and (group.get("foreach") or group.get("fused")):
            raise RuntimeError(
                f"parameter '{fqn_of(mine)}' is a plain tensor while {type(optimizer).__name__} steps, and "
                f"'{fqn_of(rest)}' with placements {tuple(rest.placements)} is not; torch's foreach and fused "
                "operators do not mix both. Give them a parameter group each, or build the optimizer with "
                "foreach=False, fused=False"
            )


@functools.cache
def _known_to_step_alone() -> frozenset[str]:
    """The classes that `scripts/separate_optimizers.py` has tried, by qualified name."""
    packages = json.loads(Path(__file__).with_name("separate_optimizers.json").read_text())
    return frozenset(name for package in packages.values() for name in package["classes"])


def _refuse_joined_steps(optimizer: torch.optim.Optimizer, owned: Sequence[DTensor]) -> None:
    """A subclass of a known class is not known: it may do anything."""
    kind, owned_elsewhere = type(optimizer), next((one for one in owned if one.device_mesh.size() > 1), None)
    if owned_elsewhere is None or getattr(optimizer, "steps_each_parameter_alone", False):
        return
    if f"{kind.__module__}.{kind.__qualname__}" not in _known_to_step_alone():
        raise RuntimeError(
            f"{kind.__name__} is not known to step on each parameter by itself, and parameter "
            f"'{fqn_of(owned_elsewhere)}' is placed on Owned(): an optimizer that computes a number "
            "from all parameters (as for clipping in its step) or communicates would be wrong there, as each rank "
            "steps on its own parameters only. If it does neither, with the options that you use, say so before "
            f"the first step: {kind.__name__}.steps_each_parameter_alone = True. If it does, shard with Shard(0)"
        )
