"""Steps of optimizers: what is refused, what sees plain tensors, and which groups are out of date afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardkit.core.engine.group import FSDPParamGroup
from shardkit.core.engine.root import live_roots
from shardkit.core.optimizer_steps.block_steps import steps_by_block
from shardkit.core.optimizer_steps.plain_steps import NUMBERS, STEPS, PlainSteps, plain_steps_of
from shardkit.core.optimizer_steps.supported import ELEMENTWISE, plain_parameters, steps_by_element
from shardkit.core.parameters.collect import added_parameters
from shardkit.core.parameters.param import FSDPParam, sharded_counterpart
from shardkit.core.torch_compat import is_within_step, like_dtensor, no_dynamo

_hooks: list[object] = []
_on_shards: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@dataclass(frozen=True)
class _Held:
    """The content of an optimizer at its last step, by `id()`: a parameter may reference it in a hook that steps.

    `id()`s are reused, so everything is looked up again after `fully_shard` was called.
    """

    identities: list[Any]  # of parameters; and whether they step in lists
    groups: list[weakref.ReferenceType[FSDPParamGroup]]
    scalars: list[int]  # places of 0-dim DTensors


_held_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Held] = weakref.WeakKeyDictionary()


def optimizer_step_on_shards(optimizer: torch.optim.Optimizer) -> None:
    """Makes `optimizer.step()` update the plain shards of its DTensor parameters, at the cost of plain tensors.

    The results are the same to the last bit, and state dicts do not change. It supports torch's element-wise
    optimizers, and those of bitsandbytes and torchao with 8-bit or 4-bit state; bitsandbytes' require it. A closure
    sees DTensors. A second call changes nothing. Not collective.

    Raises:
        TypeError: for any other optimizer, including subclasses, which may do anything.
        RuntimeError: at a step, if a gradient has other placements than its parameter; of bitsandbytes' 8-bit
            optimizers, if a parameter's shards are not whole blocks of 256 elements; the message has its FQN.
    """
    if not steps_by_element(optimizer) and not steps_by_block(optimizer):
        names = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise TypeError(
            f"{type(optimizer).__name__} is not known to update each element by itself; optimizer_step_on_shards takes "
            f"{names} of torch.optim, and of bitsandbytes and torchao those that step block by block. Call step() "
            "without it, on DTensors"
        )
    _on_shards.add(optimizer)
    watch_optimizers()


@no_dynamo
def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Step pre-hook of every optimizer: finds what would train wrongly; makes it see plain tensors where it must."""
    known = _held_by.get(optimizer)
    steps: PlainSteps | None = optimizer.__dict__.get(STEPS)
    if steps is not None and steps.is_lent:
        if is_within_step(optimizer):  # torch calls hooks for the step of a base class, too
            return
        steps.give_back(optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    lists = [(group.get("foreach"), group.get("fused")) for group in optimizer.param_groups]
    identities = [FSDPParam.replaced, *lists, *map(id, held)]
    if known is None or known.identities != identities:
        groups = _find_groups(optimizer, held)
        plain = plain_parameters(optimizer, all_shards=optimizer in _on_shards)
        steps = plain_steps_of(optimizer, make=bool(plain))
        if steps is not None:
            steps.chosen = frozenset(map(id, plain))
        known_state = steps_by_element(optimizer)  # others may keep plain numbers under any name
        scalars = [place for place, one in enumerate(held) if known_state and isinstance(one, DTensor) and not one.ndim]
        known = _held_by[optimizer] = _Held(identities, groups, scalars)
    _check_gradients(optimizer, known)
    if steps is not None and steps.chosen:
        steps.hook_innermost(optimizer)
        return
    for one in map(held.__getitem__, known.scalars):  # torch.distributed.checkpoint loads their state as plain tensors
        state = optimizer.state.get(one, {})
        loaded = {key for key, value in state.items() if type(value) is torch.Tensor and not value.ndim} - NUMBERS
        state.update({key: like_dtensor(state[key], one) for key in loaded})


def _check_gradients(optimizer: torch.optim.Optimizer, known: _Held) -> None:
    for reference in known.groups:
        if (group := reference()) is not None:
            pending = [param for param in group.check_step() if id(param.sharded_param) in known.identities]
            # `torch.distributed.checkpoint.state_dict` makes states by a step with an lr of 0.
            if pending and any(one.get("lr") != 0 for one in optimizer.param_groups):
                pending[0].refuse_pending("an optimizer steps")


def _find_groups(
    optimizer: torch.optim.Optimizer, held: list[torch.Tensor]
) -> list[weakref.ReferenceType[FSDPParamGroup]]:
    params: list[FSDPParam] = []
    for one in held:
        if (param := sharded_counterpart(one)) is None:
            continue
        if param.sharded_param is not one and one not in {slot.get() for slot in param.slots} - {param.unsharded_param}:
            raise RuntimeError(
                f"this {type(optimizer).__name__} holds a plain tensor for parameter '{param.fqn}', from before it was "
                "sharded or while it was unsharded, or one that load_state_dict(assign=True) has replaced, so its step "
                "would change nothing. Build it after fully_shard and such loads, not between forward and backward"
            )
        params.append(param)
    _refuse_local_numbers(optimizer, params)
    if others := {id(parameter) for parameter in held if sharded_counterpart(parameter) is None}:
        _refuse_added(optimizer, others)
    return [weakref.ref(group) for group in dict.fromkeys(map(FSDPParamGroup.of, params))]


def _refuse_local_numbers(optimizer: torch.optim.Optimizer, params: Iterable[FSDPParam]) -> None:
    """`item()` of a sum over a DTensor covers only this rank's shard; Prodigy sums over ranks only if told to."""
    of_several = [param for param in params if param.mesh.size > 1]
    if of_several and any(group.get("fsdp_in_use") is False for group in optimizer.param_groups):
        raise RuntimeError(
            f"{type(optimizer).__name__} has fsdp_in_use=False, and parameter '{of_several[0].fqn}' is sharded: "
            "each rank would estimate a step size of its own. Build the optimizer with fsdp_in_use=True"
        )
    cut = next((one for one in of_several if type(one.placement) is Shard and one.mesh.shard_size > 1), None)
    if cut is not None and isinstance(optimizer, torch.optim.Adafactor):
        raise RuntimeError(
            f"torch's Adafactor scales each step by norms of the whole parameter, and '{cut.fqn}' is sharded: each "
            "rank would take the norms of its shard. Place it on Owned() or Replicate() (docs/how-to/placements.md)"
        )


def _refuse_added(optimizer: torch.optim.Optimizer, held: set[int]) -> None:
    """A parameter added to a sharded model later would differ between ranks after the first step."""
    roots = [root for root in live_roots if any(group.mesh.size > 1 for group in root.schedule.groups)]
    for root in roots:
        for module in (one for reference in root.modules if (one := reference()) is not None):
            for fqn, parameter in added_parameters(module):
                if id(parameter) in held:
                    raise RuntimeError(
                        f"this {type(optimizer).__name__} trains parameter '{fqn}', which was added to "
                        f"{type(module).__name__} after fully_shard: it is not sharded, and each rank would train it "
                        "on its own batches alone. Complete the model before fully_shard, or call fully_shard on the "
                        "new module as well. To leave it unsharded, pass it in ignored_params"
                    )


@no_dynamo
def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Step post-hook of every optimizer: tells the groups, as some kernels bump no version counter of a DTensor."""
    known = _held_by.get(optimizer)
    steps: PlainSteps | None = optimizer.__dict__.get(STEPS)
    if known is None or (steps is not None and steps.is_lent):  # the step around this one goes on
        return
    if len(args) > 1 or kwargs.get("closure") is not None:
        _check_gradients(optimizer, known)
    for group in filter(None, (reference() for reference in known.groups)):
        group.versions.clear()


def watch_optimizers() -> None:
    """Hooks into the steps of all optimizers of the process, since any may hold newly sharded parameters."""
    _held_by.clear()
    if not _hooks:
        _hooks.extend((register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)))
