"""Cuts optimizer state of one process, in plain tensors of the whole shape, to this rank's part.

`load_state_dict` receives such state from files of one process and from torch's `full_state_dict=True`. It is cut when
it is loaded, or before the first step if the optimizer has not stepped yet: it is not known earlier.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.optimizer_steps.block_steps import inner_tensors, target_by_block
from shardkit.core.parameters.param import fqn_of, sharded_counterpart
from shardkit.core.parameters.placements import is_ours
from shardkit.core.parameters.region import region_of
from shardkit.core.torch_compat import like_dtensor, local_of

__all__ = ["NUMBERS", "cut_whole_state", "part_of_state"]

# State of torch's optimizers that is one number for a whole parameter, even for a 0-dim one.
NUMBERS = {"step", "eta", "mu", "mu_product"}

# Packages whose optimizers keep DTensor state for DTensors.
_KNOWN = ("torch.optim.", "torchao.")

_seen: WeakSet[torch.optim.Optimizer] = WeakSet()


def cut_whole_state(optimizer: torch.optim.Optimizer) -> None:
    """Before the first step: cuts loaded state to this rank's part, and state that is loaded later."""
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    if not hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):  # wraps another optimizer, such as Lookahead
        return
    optimizer.register_load_state_dict_pre_hook(_cut_loaded)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state and _is_cut(optimizer, parameter):
                optimizer.state[parameter] = part_of_state(state, parameter)


def _cut_loaded(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Load state dict pre-hook."""
    state = dict(state_dict["state"])
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for parameter, number in zip(group["params"], saved["params"], strict=False):
            if number in state and _is_cut(optimizer, parameter):
                state[number] = part_of_state(state[number], parameter)
    return {**state_dict, "state": state}


def _is_cut(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether state of the whole shape must be cut; other optimizers may keep whole tensors for a `Shard`."""
    if not isinstance(parameter, DTensor) or sharded_counterpart(parameter) is None:
        return False
    return any(is_ours(one) for one in parameter.placements) or any(
        f"{kind.__module__}.".startswith(_KNOWN) and kind is not torch.optim.Optimizer
        for kind in type(optimizer).__mro__
    )


def part_of_state(state: dict[str, Any], parameter: DTensor) -> dict[str, Any]:
    """State of one parameter with this rank's part in place of plain tensors of the whole shape.

    Raises:
        RuntimeError: for whole quantized state on `Shard`; the message has the FQN and a remedy.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        inner = inner_tensors(value) if isinstance(value, torch.Tensor) and value.shape == parameter.shape else None
        if inner is None:
            found[key] = _part(key, value, parameter)
            continue
        if not any(is_ours(one) for one in parameter.placements):
            raise RuntimeError(
                f"state '{key}' of parameter '{fqn_of(parameter)}' is a {type(value).__name__} of "
                f"the whole, and cannot be cut for placements {tuple(parameter.placements)}, because values and "
                "scales belong together. Shard with placements_for(model, ...), or load a checkpoint with "
                "CheckpointManager"
            )
        found.update({f"{key}.{name}": _part(f"{key}.{name}", part, parameter) for name, part in inner.items()})
    return found


def _part(key: str, value: Any, parameter: DTensor) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or key in NUMBERS:
        return value
    if value.shape == parameter.shape:
        local = local_of(parameter)
        mine = region_of(key, parameter).take(value).reshape(local.shape)
        return like_dtensor(mine.to(local.device, copy=True, memory_format=torch.contiguous_format), parameter)
    target = target_by_block(key, value.dtype, tuple(value.shape), parameter)
    if isinstance(target, DTensor):
        local_of(target).copy_(region_of(key, target).take(value))
        return target
    return value
