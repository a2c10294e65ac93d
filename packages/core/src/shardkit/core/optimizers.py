"""What optimizers mean for groups: one built too early is refused, and a step makes what is unsharded stale."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardkit.core.param import sharded_counterpart
from shardkit.core.param_group import FSDPParamGroup

__all__ = ["watch_optimizers"]

# The groups whose parameters an optimizer steps, and how many parameters it had when they were looked up.
_groups_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, list[weakref.ReferenceType[FSDPParamGroup]]]]
_groups_of = weakref.WeakKeyDictionary()


def refuse_stale_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Optimizer step pre-hook, once per optimizer: finds one that was built before sharding.

    It holds the original parameters, whose gradients never come: training would silently do nothing.

    Raises:
        RuntimeError: with the FQN of the first such parameter.
    """
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _groups_of.get(optimizer)
    if known is not None and known[0] == count:
        return
    groups: dict[FSDPParamGroup, None] = {}
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
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
    _groups_of[optimizer] = (count, [weakref.ref(group) for group in groups])


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Fused and foreach kernels bump no version counter of a DTensor, so groups are told."""
    for reference in _groups_of[optimizer][1]:
        if (group := reference()) is not None:
            group.stale = True


@functools.cache
def watch_optimizers() -> None:
    """Hooks into the steps of all optimizers of the process, once: any of them may hold sharded parameters."""
    register_optimizer_step_pre_hook(refuse_stale_optimizer)
    register_optimizer_step_post_hook(_note_step)
