"""Steps of element-wise and block-wise optimizers on the plain tensors inside sharded parameters.

Note [Two views of one state]
DTensor operators cost host time for each parameter and each operator. An element-wise update does not need them: what
it does to an element depends on that element alone, so every rank can update its shard as a plain tensor. While the
optimizer steps, its parameter groups and its state hold plain tensors over the memory of the DTensors that they hold
at any other time. The same holds for updates that depend on a block of consecutive elements: a rank's blocks start with
its shard. Schedulers, gradient scalers and state dicts see DTensors, and so do the user's step hooks: a hook that clips
gradients would take the norm of a shard for that of all ranks. So our own hooks are the innermost.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import defaultdict
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.adapters import user_attributes
from shardkit.core.block_steps import (
    carry_overrides,
    check_blocks,
    is_laid_out_by_block,
    scales_of_shards,
    steps_by_block,
)
from shardkit.core.param import sharded_counterpart
from shardkit.core.torch_compat import hook_innermost, like_dtensor, local_of, no_dynamo

__all__ = ["ShardSteps", "optimizer_step_on_shards", "steps_by_element"]

_ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

# State of torch's optimizers that is one number for a whole parameter; everything else has the parameter's shape.
_NUMBERS = {"step", "eta", "mu", "mu_product"}


def steps_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's that update each element by itself; a subclass may do anything."""
    return type(optimizer) in _ELEMENTWISE or type(optimizer) is torch.optim.AdamW


def optimizer_step_on_shards(optimizer: torch.optim.Optimizer) -> None:
    """From now on `optimizer.step()` updates the plain shards of its DTensor parameters, at the cost of plain tensors.

    The results are the same to the last bit, and state dicts stay as they are. For torch's element-wise optimizers, and
    those of bitsandbytes and torchao with 8-bit or 4-bit state: bitsandbytes' run in no other way. Others (Adafactor,
    Muon, LBFGS) read whole parameters. A step with a closure takes the usual way. A second call changes nothing. Not
    collective.

    Raises:
        TypeError: for any other optimizer, subclasses included: they may do anything.
        RuntimeError: at a step of bitsandbytes' 8-bit optimizers, for a parameter whose shards are not whole blocks of
            256 elements, with its FQN.
    """
    if not steps_by_element(optimizer) and not steps_by_block(optimizer):
        names = ", ".join(sorted({kind.__name__ for kind in _ELEMENTWISE} | {"AdamW"}))
        raise TypeError(
            f"{type(optimizer).__name__} is not known to update each element by itself; optimizer_step_on_shards takes "
            f"{names} of torch.optim, and of bitsandbytes and torchao those that step block by block. Call step() "
            "without it: DTensor operators are right for every optimizer"
        )
    if optimizer in _prepared:
        return
    _prepared.add(optimizer)
    steps = ShardSteps()
    optimizer.register_load_state_dict_pre_hook(steps.forget)
    _surround_steps(optimizer, steps)


_prepared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _surround_steps(optimizer: torch.optim.Optimizer, steps: ShardSteps) -> None:
    """Hooks come anew with each step, to be the innermost, and a step that raises runs no post-hook."""
    inner = optimizer.step

    @functools.wraps(inner)  # a scheduler that was made before looks for its mark
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        handles = hook_innermost(optimizer, steps.begin, steps.end)
        try:
            return inner(*args, **kwargs)
        finally:
            steps.end(self, args, kwargs)
            for handle in handles:
                handle.remove()

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


class _Twin:
    """A sharded parameter and the plain one over its shard; `state` pairs what both views have under each key."""

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter
        self.local = local_of(parameter)
        self.plain = nn.Parameter(self.local, requires_grad=parameter.requires_grad)
        self.plain.__dict__.update(user_attributes(parameter))
        self.pairs: dict[str, tuple[Any, Any]] = {}

    def take_gradient(self, passed_over: bool) -> None:
        """Gives the twin the gradient of the parameter, or none if the optimizer is to pass it over."""
        gradient = None if passed_over else self.parameter.grad
        self.plain.grad = None if gradient is None else _local_gradient(self.parameter, cast(DTensor, gradient))
        self._had_gradient = gradient is not None

    def give_gradient_back(self) -> None:
        """After the step; an optimizer that has dropped the gradient has dropped that of the parameter."""
        if self._had_gradient and self.plain.grad is None:
            self.parameter.grad = None
        self.plain.grad = None

    def lend_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same state with plain tensors."""
        lent = {}
        for key, value in state.items():
            pair = self.pairs.get(key)
            if pair is None or pair[0] is not value:
                pair = self.pairs[key] = value, local_of(value) if isinstance(value, DTensor) else value
            lent[key] = pair[1]
        return lent

    def take_state(self, state: dict[str, Any], lent: dict[str, Any]) -> None:
        """Brings what the step has added or replaced back into `state`."""
        for key, value in lent.items():
            pair = self.pairs.get(key)
            if pair is None or pair[1] is not value:
                pair = self.pairs[key] = self._whole(key, value), value
            state[key] = pair[0]

    def _whole(self, key: str, value: Any) -> Any:
        if is_laid_out_by_block(key):
            return scales_of_shards(key, value, self.parameter)
        sharded = isinstance(value, torch.Tensor) and key not in _NUMBERS and value.shape == self.local.shape
        return like_dtensor(value, self.parameter) if sharded else value


def _local_gradient(parameter: DTensor, gradient: DTensor) -> torch.Tensor:
    if gradient.placements is not parameter.placements and tuple(gradient.placements) != tuple(parameter.placements):
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} with placements {tuple(parameter.placements)} has a "
            f"gradient with {tuple(gradient.placements)}; redistribute it before the step, or step without "
            "optimizer_step_on_shards"
        )
    return local_of(gradient)


class ShardSteps:
    """What is put aside while an optimizer steps on plain tensors, and the plain twins of its parameters."""

    def __init__(self) -> None:
        self._twins: dict[int, _Twin] = {}
        self._params: list[list[torch.Tensor]] | None = None
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)

    def wants(self, optimizer: torch.optim.Optimizer, parameter: DTensor) -> bool:
        """Whether the optimizer is to see a plain twin of this parameter."""
        return True

    def passes_over(self, optimizer: torch.optim.Optimizer, parameter: DTensor) -> bool:
        """Whether the twin is to have no gradient, and no state."""
        return False

    @no_dynamo
    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Step pre-hook: the optimizer sees plain tensors, unless a closure is to run forward and backward."""
        if (args and args[-1] is not None and callable(args[-1])) or kwargs.get("closure") is not None:
            return None
        self.lend(optimizer)
        return None

    def lend(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts the plain twins, with their state, in the place of the parameters."""
        self._params = [group["params"] for group in optimizer.param_groups]
        self._state = optimizer.state
        used: dict[int, _Twin] = {}
        lent: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for group, params in zip(optimizer.param_groups, self._params, strict=True):
            group["params"] = [self._twin_of(optimizer, parameter, used) for parameter in params]
        for key, state in self._state.items():
            twin = used.get(id(key))
            if twin is None:
                lent[key] = state
            elif state:
                lent[twin.plain] = twin.lend_state(state)
        self._twins = used
        optimizer.state = lent
        carry_overrides(optimizer, [(twin.parameter, twin.plain) for twin in used.values()])

    def _twin_of(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, used: dict[int, _Twin]
    ) -> torch.Tensor:
        if not isinstance(parameter, DTensor) or not self.wants(optimizer, parameter):
            return parameter
        key = id(parameter)
        twin = self._twins.get(key)
        if twin is None or twin.parameter is not parameter or twin.local is not local_of(parameter):
            param = sharded_counterpart(parameter)
            check_blocks(optimizer, parameter, "?" if param is None else param.fqn)
            twin = _Twin(parameter)
        used[key] = twin
        passed_over = self.passes_over(optimizer, parameter)
        if passed_over:
            self._state.pop(parameter, None)  # as it was when another rank began to change it
        twin.take_gradient(passed_over)
        return twin.plain

    def forget(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Before another state is loaded: nothing of the old one is kept."""
        self._twins.clear()

    @no_dynamo
    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Step post-hook: everything is as it was, with the new state."""
        if self._params is None:
            return
        lent, optimizer.state = cast(dict[torch.Tensor, Any], optimizer.state), self._state
        twins = {id(twin.plain): twin for twin in self._twins.values()}
        for key, state in lent.items():
            twin = twins.get(id(key))
            if twin is None:
                self._state[key] = state
            else:
                twin.take_state(self._state[twin.parameter], state)
        for twin in twins.values():
            twin.give_gradient_back()
        for group, params in zip(optimizer.param_groups, self._params, strict=True):
            group["params"] = params
        self._params = None
        self._state = defaultdict(dict)
