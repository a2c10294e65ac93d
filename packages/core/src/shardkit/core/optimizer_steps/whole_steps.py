"""Optimizer steps on owned parameters as plain tensors, for optimizers that do not know DTensors.

Note [Steps on whole matrices]
While any optimizer of the process steps, its parameters on `Owned` are plain tensors: the whole matrix on the owner,
and an empty tensor without a gradient on all other ranks, which every optimizer skips. So Muon, Shampoo and similar
optimizers run unmodified, with any operator, and nothing is communicated. Optimizers of torch that are known to handle
empty tensors do step: all ranks then have state for every parameter, as stock's `set_optimizer_state_dict` requires.

Parameters on `Blocks` are plain tensors too, for optimizers that treat each element, or each block of elements in
memory, separately. Others get the DTensor, whose operators refuse what blocks do not support. State of the parameter's
own shape is a DTensor between the steps, so that checkpoints know its placement. Other state stays as the optimizer
made it, on the owner only. See Note [Two views of one state] in `shard_steps.py`.

torch's foreach and fused operators accept either plain tensors or DTensors of one mesh. So an element-wise optimizer of
torch sees plain tensors for all of its DTensors if it sees one; otherwise one list would mix both kinds.

Our hooks are added at each step, as the innermost: users' hooks see DTensors, so a norm there is that of the whole.

A step that raises runs no post-hook. The next step, state dict or forward of a root first restores everything.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardkit.core.optimizer_steps.block_steps import steps_by_block
from shardkit.core.optimizer_steps.shard_steps import ELEMENTWISE, ShardSteps, Twin, steps_by_element
from shardkit.core.parameters.param import sharded_counterpart
from shardkit.core.parameters.placed import PlacedTensor
from shardkit.core.parameters.placements import Blocks, Owned
from shardkit.core.torch_compat import (
    hook_innermost,
    is_compared_with_whole_state,
    is_gathered_by_torch,
    is_within_step,
    lies_like,
    local_of,
    no_dynamo,
)

__all__ = ["after_step", "before_step", "restore_interrupted_steps"]


def _refuse_part_of_matrix(optimizer: torch.optim.Optimizer, parameter: PlacedTensor) -> None:
    """Refuses a tensor-parallel shard on its owner: an optimizer of matrices would take it for the matrix.

    Raises:
        RuntimeError: with the FQN, the placements and a remedy.
    """
    if steps_by_element(optimizer) or steps_by_block(optimizer):
        return
    mesh, owned = parameter.device_mesh, any(isinstance(one, Owned) for one in parameter.placements)
    cut = [
        one
        for axis, one in enumerate(parameter.placements)
        if not one.is_replicate() and not isinstance(one, Owned) and mesh.size(axis) > 1
    ]
    if owned and cut:
        param = sharded_counterpart(parameter)
        raise RuntimeError(
            f"parameter '{'?' if param is None else param.fqn}' of shape {tuple(parameter.shape)} has placements "
            f"{tuple(parameter.placements)}: its owner holds one tensor-parallel shard, and {type(optimizer).__name__} "
            "may need the whole matrix. Step on it with AdamW, or keep it out of tensor parallelism"
        )


@functools.cache
def _known_to_step_alone() -> frozenset[str]:
    """The classes that `tests/core/separate_optimizers.py` has tried, by qualified name."""
    packages = json.loads(Path(__file__).with_name("separate_optimizers.json").read_text())
    return frozenset(name for package in packages.values() for name in package["classes"])


def _refuse_joined_steps(optimizer: torch.optim.Optimizer, placed: Sequence[PlacedTensor]) -> None:
    """Refuses optimizers that may combine parameters or communicate: they would see only this rank's parameters.

    A subclass of a known class is not known: it may do anything.

    Raises:
        RuntimeError: with an FQN and a remedy.
    """
    kind = type(optimizer)
    if f"{kind.__module__}.{kind.__qualname__}" in _known_to_step_alone():
        return
    if getattr(optimizer, "steps_each_parameter_alone", False):
        return
    for one in placed:
        if one.device_mesh.size() > 1 and any(isinstance(placement, Owned) for placement in one.placements):
            param = sharded_counterpart(one)
            raise RuntimeError(
                f"{kind.__name__} is not known to step on each parameter by itself, and parameter "
                f"'{'?' if param is None else param.fqn}' is placed on Owned(): an optimizer that computes a number "
                "from all parameters (as for clipping in its step) or communicates would be wrong there, as each rank "
                "steps on its own parameters only. If it does neither, with the options that you use, say so before "
                f"the first step: {kind.__name__}.steps_each_parameter_alone = True. If it does, shard with Shard(0)"
            )


def _placed(optimizer: torch.optim.Optimizer) -> list[PlacedTensor]:
    """The optimizer's parameters on `Owned` or `Blocks`."""
    return [one for group in optimizer.param_groups for one in group["params"] if isinstance(one, PlacedTensor)]


def _steps_plainly(optimizer: torch.optim.Optimizer, parameter: PlacedTensor) -> bool:
    """Whether the optimizer sees a plain tensor in place of this parameter."""
    for one in parameter.placements:
        if isinstance(one, Owned):
            return True
        if isinstance(one, Blocks):
            return steps_by_element(optimizer) or steps_by_block(optimizer)
    return False


def _sees_plain_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer sees a plain tensor in place of any parameter."""
    if any(_steps_plainly(optimizer, one) for one in _placed(optimizer)):
        return True
    return steps_by_element(optimizer) and any(len(_meshes(group["params"])) > 1 for group in _listed(optimizer))


def _listed(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Groups whose steps use foreach or fused operators."""
    return [group for group in optimizer.param_groups if group.get("foreach") or group.get("fused")]


def _meshes(params: Sequence[torch.Tensor]) -> set[int]:
    """The meshes of parameters, by identity, of None for plain tensors: these operators accept only one of them."""
    return {*map(id, map(getattr, params, repeat("device_mesh"), repeat(None)))}


def _refuse_mixed_lists(optimizer: torch.optim.Optimizer) -> None:
    """Refuses plain tensors together with DTensors, which torch's foreach and fused operators do not accept.

    Raises:
        RuntimeError: with an FQN and a remedy.
    """
    if steps_by_element(optimizer) or not isinstance(optimizer, _TAKES_LISTS):
        return
    for group in _listed(optimizer):
        plainly = [isinstance(p, PlacedTensor) and _steps_plainly(optimizer, p) for p in group["params"]]
        if not any(plainly):
            continue
        rest = next((p for p, plain in zip(group["params"], plainly, strict=True) if not plain), None)
        if isinstance(rest, DTensor):
            owned, param = sharded_counterpart(group["params"][plainly.index(True)]), sharded_counterpart(rest)
            raise RuntimeError(
                f"parameter '{'?' if owned is None else owned.fqn}' is a plain tensor while {type(optimizer).__name__} "
                f"steps, and '{'?' if param is None else param.fqn}' with placements {tuple(rest.placements)} is not; "
                "torch's foreach and fused operators do not mix both. Give them a parameter group each, or build "
                "the optimizer with foreach=False, fused=False"
            )


class _WholeSteps(ShardSteps):
    def __init__(self) -> None:
        super().__init__()
        self.handles: list[RemovableHandle] = []
        self.inner = 0  # nested steps of base classes within a subclass's step: torch calls hooks for each

    @no_dynamo
    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Step pre-hook. `optimizer_step_on_shards` may have made all parameters plain already."""
        if self.inner or not _sees_plain_tensors(optimizer):
            return None
        arguments = _with_closure(optimizer, self, args, kwargs)
        self.lend(optimizer)
        return arguments

    @no_dynamo
    def finish(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Step post-hook."""
        if not self.inner:
            self.end(optimizer, args, kwargs)

    def seen_by(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, used: dict[int, Twin]) -> torch.Tensor:
        """A plain twin if `_steps_plainly` accepts the parameter; a skipped one has no gradient and no state."""
        if not isinstance(parameter, PlacedTensor):
            return super().seen_by(optimizer, parameter, used) if _is_element_wise(optimizer, parameter) else parameter
        if not _steps_plainly(optimizer, parameter):
            return parameter
        if not self._passes_over(optimizer, parameter):
            return super().seen_by(optimizer, parameter, used)
        return self.passed_over(optimizer, parameter, used)

    def _passes_over(self, optimizer: torch.optim.Optimizer, parameter: PlacedTensor) -> bool:
        if local_of(parameter).numel() or steps_by_element(optimizer) or type(optimizer) is torch.optim.Muon:
            return False
        return any(isinstance(one, Owned) for one in parameter.placements)

    @property
    def is_lent(self) -> bool:
        return self._params is not None


def _is_element_wise(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether updating each rank's shard is correct: it is, unless the user's gradient has another placement."""
    if not isinstance(parameter, DTensor) or not steps_by_element(optimizer):
        return False
    return parameter.grad is None or lies_like(parameter.grad, parameter)


# Optimizers of torch that have foreach operators, and base classes of others.
_TAKES_LISTS = (*ELEMENTWISE, torch.optim.Adafactor)

_steps: WeakKeyDictionary[torch.optim.Optimizer, _WholeSteps] = WeakKeyDictionary()
_lent: WeakSet[torch.optim.Optimizer] = WeakSet()


@no_dynamo
def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Step pre-hook of every optimizer: see Note [Steps on whole matrices]."""
    steps = _steps.get(optimizer)
    if steps is not None and optimizer in _lent and is_within_step(optimizer):
        steps.inner += 1
        return None
    _restore(optimizer)
    if not _sees_plain_tensors(optimizer):
        return None
    placed = _placed(optimizer)
    for parameter in placed:
        _refuse_part_of_matrix(optimizer, parameter)
    _refuse_mixed_lists(optimizer)
    _refuse_joined_steps(optimizer, placed)
    if steps is None:
        steps = _steps[optimizer] = _WholeSteps()
        optimizer.register_load_state_dict_pre_hook(steps.forget)
        optimizer.register_state_dict_pre_hook(_restore)
        optimizer.register_state_dict_post_hook(_let_torch_give_whole_state)
    steps.handles = hook_innermost(optimizer, steps.begin, steps.finish)
    _lent.add(optimizer)
    return None


@no_dynamo
def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Step post-hook of every optimizer."""
    steps = _steps.get(optimizer)
    if steps is not None and steps.inner:
        steps.inner -= 1
        return
    _restore(optimizer)


def _some_rank_passes_over(optimizer: torch.optim.Optimizer, parameter: PlacedTensor) -> bool:
    """Whether `_passes_over` is true on any rank."""
    if steps_by_element(optimizer) or type(optimizer) is torch.optim.Muon:
        return False
    for axis, one in enumerate(parameter.placements):
        ranks = parameter.device_mesh.size(axis)
        if isinstance(one, Owned) and ranks > 1:
            return True
        if isinstance(one, Blocks) and steps_by_block(optimizer):
            whole = parameter.numel() if one.rows is None else parameter.shape[0]
            blocks = -(-whole // (one.elements or one.rows or 1))
            return -(-blocks // ranks) * (ranks - 1) >= blocks
    return False


def _let_torch_give_whole_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """State dict post-hook: torch leaves plain tensors whole, and cuts only for its own placements.

    Raises:
        RuntimeError: if torch is about to gather state that other ranks lack, and would wait for them forever.
    """
    if any(_some_rank_passes_over(optimizer, one) for one in _placed(optimizer)) and is_gathered_by_torch():
        raise RuntimeError(
            f"some ranks have no state of {type(optimizer).__name__}, as others own the parameter or hold all of its "
            "blocks, and torch's get_optimizer_state_dict with full_state_dict=True gathers from all ranks. Save "
            "without full_state_dict, or with CheckpointManager"
        )
    if is_compared_with_whole_state():
        for number, values in state_dict["state"].items():
            plain = {key: local_of(one) if isinstance(one, PlacedTensor) else one for key, one in values.items()}
            state_dict["state"][number] = plain


def restore_interrupted_steps() -> None:
    """Ends steps that have raised. Usually only checks an empty set."""
    for optimizer in list(_lent):
        if _steps[optimizer].is_lent:  # and no closure is running forward
            _restore(optimizer)


def _restore(optimizer: torch.optim.Optimizer) -> None:
    steps = _steps.get(optimizer)
    if steps is not None:
        steps.inner = 0
        steps.end(optimizer, (), {})
        for handle in steps.handles:
            handle.remove()
    _lent.discard(optimizer)


def _closure_of(args: Any, kwargs: Any) -> Any:
    """The closure among the arguments of a step hook; the optimizer is the first argument."""
    if kwargs.get("closure") is not None:
        return kwargs["closure"]
    return args[1] if len(args) > 1 and callable(args[1]) else None


def _with_closure(optimizer: torch.optim.Optimizer, steps: _WholeSteps, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a step, with a closure that sees the parameters themselves while it runs."""

    def around(closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            steps.end(optimizer, (), {})
            try:
                return closure()
            finally:
                steps.lend(optimizer)

        return run

    closure = _closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    if kwargs.get("closure") is closure:
        return args, {**kwargs, "closure": around(closure)}
    return (args[0], around(closure), *args[2:]), kwargs
