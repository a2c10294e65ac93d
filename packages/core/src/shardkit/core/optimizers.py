"""Optimizers and groups: refuses optimizers that were built too early, and marks groups stale after a step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardkit.core.engine.lazy_init import live_roots
from shardkit.core.engine.param_group import FSDPParamGroup
from shardkit.core.optimizer_steps.whole_state import cut_whole_state
from shardkit.core.optimizer_steps.whole_steps import after_step, before_step
from shardkit.core.parameters.gradient_hooks import check_gradient
from shardkit.core.parameters.managed import added_parameters
from shardkit.core.parameters.param import sharded_counterpart
from shardkit.core.torch_compat import no_dynamo

__all__ = ["watch_optimizers"]


@dataclass(frozen=True)
class _Held:
    """The parameters of an optimizer at its last step, and their groups.

    It stores identities, not parameters: parameters may reference the optimizer, in hooks that step in backward, and
    keep it alive. `id()`s are reused, so everything is looked up again after `fully_shard` was called.
    """

    identities: list[int]
    groups: list[weakref.ReferenceType[FSDPParamGroup]]


_held_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Held] = weakref.WeakKeyDictionary()


@no_dynamo
def refuse_stale_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Optimizer step pre-hook: finds an optimizer that was built before sharding, whenever its parameters change.

    Such an optimizer holds the original parameters, which never get gradients: training would silently do nothing. The
    same holds for gradients that no backward has reduced, or whose user's writes were lost.

    Raises:
        RuntimeError: with the FQN of the first such parameter.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    identities = [*map(id, held)]
    known = _held_by.get(optimizer)
    if known is None or known.identities != identities:
        cut_whole_state(optimizer)
        known = _held_by[optimizer] = _find_groups(optimizer, held)
    for reference in known.groups:
        if (group := reference()) is not None:
            group.check_reduced()
            pending = [param for param in group.pending if id(param.sharded_param) in identities]
            if pending and not _makes_states(optimizer):
                pending[0].refuse_pending("an optimizer steps")
            for param in group.params:
                check_gradient(param.fqn, param.sharded_param.grad)


def _makes_states(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step is one of `torch.distributed.checkpoint.state_dict`, which initialises states: all lr are 0."""
    return all(group.get("lr") == 0 for group in optimizer.param_groups)


def _find_groups(optimizer: torch.optim.Optimizer, held: list[torch.Tensor]) -> _Held:
    groups: dict[FSDPParamGroup, None] = {}
    for parameter in held:
        param = sharded_counterpart(parameter)
        if param is None:
            continue
        if param.sharded_param is not parameter:
            raise RuntimeError(
                f"this {type(optimizer).__name__} holds a plain tensor for parameter '{param.fqn}', from before it was "
                "sharded or while it was unsharded, so its step would change nothing. Build the optimizer after "
                "fully_shard and not between forward and backward, from model.parameters()"
            )
        groups[FSDPParamGroup.of(param)] = None
    _refuse_local_numbers(optimizer, groups)
    _refuse_added(optimizer, {id(parameter) for parameter in held if sharded_counterpart(parameter) is None})
    return _Held([*map(id, held)], [weakref.ref(group) for group in groups])


def _refuse_local_numbers(optimizer: torch.optim.Optimizer, groups: Iterable[FSDPParamGroup]) -> None:
    """`item()` of a sum over a DTensor covers only this rank's shard; Prodigy sums over ranks only if told to."""
    sharded = next((group for group in groups if group.mesh.size > 1), None)
    if sharded is not None and any(group.get("fsdp_in_use") is False for group in optimizer.param_groups):
        raise RuntimeError(
            f"{type(optimizer).__name__} has fsdp_in_use=False, and parameter '{sharded.params[0].fqn}' is sharded: "
            "each rank would estimate a step size of its own. Build the optimizer with fsdp_in_use=True"
        )


def _refuse_added(optimizer: torch.optim.Optimizer, held: set[int]) -> None:
    """A parameter added to a sharded model later would differ between ranks after the first step."""
    roots = (
        [root for root in live_roots if any(group.mesh.size > 1 for group in root.schedule.order.groups)]
        if held
        else []
    )
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
def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Tells groups of a step, because fused and foreach kernels bump no version counter of a DTensor.

    Raises:
        RuntimeError: if the closure of the step left gradients that wait: the step has missed them.
    """
    held = _held_by.get(optimizer)
    if len(args) > 1 or kwargs.get("closure") is not None:
        refuse_stale_optimizer(optimizer, args, kwargs)
    for reference in held.groups if held is not None else ():
        if (group := reference()) is not None:
            group.note_step()


def watch_optimizers() -> None:
    """Hooks into the steps of all optimizers of the process, since any may hold newly sharded parameters."""
    _held_by.clear()
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(refuse_stale_optimizer)
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    register_optimizer_step_post_hook(_note_step)
