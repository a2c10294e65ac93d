"""Steps of element-wise and block-wise optimizers on the plain tensors inside sharded parameters.

Note [Two views of one state]
DTensor operators cost host time for each parameter and each operator. An element-wise update does not need them: the
update of an element depends only on that element, so every rank can update its shard as a plain tensor. While the
optimizer steps, its parameter groups and its state hold plain tensors over the memory of the DTensors that they
normally hold. The same works for updates that depend on a block of consecutive elements, because a rank's blocks start
with its shard. Schedulers, gradient scalers and state dicts see DTensors, and so do the user's step hooks: a hook that
clips gradients would take the norm of a shard for that of all ranks. So our own hooks are the innermost.

Going through thousands of parameters takes longer than their update. Most steps are like the one before: the same
parameters over the same shards, with the same tensors as state. C loops find that out, and only a step that differs
goes through the parameters one by one.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import chain, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.optimizer_steps.block_steps import (
    carry_overrides,
    check_blocks,
    is_laid_out_by_block,
    join_parts,
    parts_of,
    scales_of_shards,
    steps_by_block,
)
from shardkit.core.optimizer_steps.whole_state import NUMBERS, part_of_state
from shardkit.core.parameters.adapters import user_attributes
from shardkit.core.parameters.param import sharded_counterpart
from shardkit.core.parameters.placements import is_ours
from shardkit.core.torch_compat import hook_innermost, lies_like, like_dtensor, local_of, no_dynamo

__all__ = ["ELEMENTWISE", "ShardSteps", "Twin", "optimizer_step_on_shards", "steps_by_element"]

ELEMENTWISE = (
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


def steps_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's that update each element separately; not true of subclasses."""
    return type(optimizer) in ELEMENTWISE or type(optimizer) is torch.optim.AdamW


def optimizer_step_on_shards(optimizer: torch.optim.Optimizer) -> None:
    """Makes `optimizer.step()` update the plain shards of its DTensor parameters, at the cost of plain tensors.

    The results are the same to the last bit, and state dicts do not change. It supports torch's element-wise
    optimizers, and those of bitsandbytes and torchao with 8-bit or 4-bit state; bitsandbytes' require it. Others
    (Adafactor, Muon, LBFGS) read whole parameters. A step with a closure runs on DTensors as usual. A second call
    changes nothing. Not collective.

    Raises:
        TypeError: for any other optimizer, including subclasses, which may do anything.
        RuntimeError: at a step of bitsandbytes' 8-bit optimizers, if a parameter's shards are not whole blocks of 256
            elements; the message has its FQN.
    """
    if not steps_by_element(optimizer) and not steps_by_block(optimizer):
        names = ", ".join(sorted({kind.__name__ for kind in ELEMENTWISE} | {"AdamW"}))
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
    """Adds hooks at each step, as the innermost; they are also undone if a step raises and no post-hook runs."""
    inner = optimizer.step

    @functools.wraps(inner)  # a scheduler created earlier checks for its mark
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        handles = hook_innermost(optimizer, steps.begin, steps.end)
        try:
            return inner(*args, **kwargs)
        finally:
            steps.end(self, args, kwargs)
            for handle in handles:
                handle.remove()

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


class Twin:
    """A sharded parameter and the plain one over its shard, with both views of its state."""

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter
        self.local = local_of(parameter)
        self.plain = nn.Parameter(self.local, requires_grad=parameter.requires_grad)
        self.plain.__dict__.update(user_attributes(parameter))
        self.had_gradient = False
        self._pairs: dict[str, tuple[Any, Any]] = {}
        self._plain_state: dict[str, Any] = {}
        self._of_state: list[Any] = []  # the contents of both views when they last agreed
        self._of_plain: list[Any] = []

    def take_gradient(self) -> None:
        """Gives the twin the gradient of the parameter.

        Raises:
            RuntimeError: if its layout differs from the parameter's.
        """
        gradient = self.parameter.grad
        self.had_gradient = gradient is not None
        if gradient is None:
            self.plain.grad = None
            return
        if not lies_like(gradient, self.parameter):
            raise RuntimeError(
                f"a parameter of shape {tuple(self.parameter.shape)} with placements {self.parameter.placements} has "
                f"a gradient with {getattr(gradient, 'placements', 'none')}; redistribute it before the step, or step "
                "without optimizer_step_on_shards"
            )
        self.plain.grad = local_of(gradient)

    def state_for_step(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The same state with plain tensors: that of the last step, if nobody has changed it since."""
        if _contents(state) != self._of_state:
            part = part_of_state(state, self.parameter)  # bitsandbytes loads without hooks
            state.clear()
            state.update(part)
            plain_state = {}
            for key, value in state.items():
                pair = self._pairs.get(key)
                if pair is None or pair[0] is not value:
                    pair = self._pairs[key] = value, local_of(value) if isinstance(value, DTensor) else value
                plain_state[key] = pair[1]
            for key in join_parts(optimizer, plain_state, self.local):
                # Over the same memory, even if it was cast.
                parts = parts_of(key, plain_state[key], self.parameter) or {}
                state.update(parts)
                self._pairs[key] = parts, plain_state[key]
            self._note(state, plain_state)
        return self._plain_state

    def take_state(self, state: dict[str, Any], plain_state: dict[str, Any]) -> bool:
        """Copies values that the step has added, replaced or removed back to `state`; whether there were any."""
        if plain_state is self._plain_state and _contents(plain_state) == self._of_plain:
            return False
        keys: set[str] = set()
        for key, value in plain_state.items():
            pair = self._pairs.get(key)
            if pair is None or pair[1] is not value:
                pair = self._pairs[key] = parts_of(key, value, self.parameter) or self._whole(key, value), value
            entries = pair[0] if isinstance(pair[0], dict) and pair[0] is not value else {key: pair[0]}
            state.update(entries)
            keys |= entries.keys()
        for key in state.keys() - keys:
            del state[key]
        self._note(state, plain_state)
        return True

    def _note(self, state: dict[str, Any], plain_state: dict[str, Any]) -> None:
        self._plain_state, self._of_state, self._of_plain = plain_state, _contents(state), _contents(plain_state)

    def _whole(self, key: str, value: Any) -> Any:
        if is_laid_out_by_block(key):
            return scales_of_shards(key, value, self.parameter)
        sharded = isinstance(value, torch.Tensor) and key not in NUMBERS and value.shape == self.local.shape
        return like_dtensor(value, self.parameter) if sharded else value


def _contents(state: dict[str, Any]) -> list[Any]:
    """Keys, and ids of values, which a twin keeps alive; equal if nothing was added, removed or replaced."""
    return [*state, *map(id, state.values())]


_States: TypeAlias = defaultdict[torch.Tensor, Any]

_gradient_of = attrgetter("grad")
_values_of = methodcaller("values")


def _all_contents(states: _States) -> tuple[list[Any], ...]:
    """`_contents` of all states of an optimizer, with the ids of the states and of their owners.

    With a state that is not a dict it is never equal.
    """
    each = [*states.values()]
    if not all(map(isinstance, each, repeat(dict))):
        return ([object()],)
    values = chain.from_iterable(map(_values_of, each))
    return [*map(id, states)], [*map(id, each)], [*map(len, each)], [*chain.from_iterable(each)], [*map(id, values)]


class _LastStep:
    """A step's parameters, gradients and states in columns, with which C loops compare those of the next one.

    Only for a step that has replaced no state and dropped no gradient: others are likely to do so again.

    Args:
        params: the parameters of each of the optimizer's groups.
        twins: the twins of all DTensors among them, by `id`.
        states: the optimizer's state after the step.
        plain_states: the same as the step saw it.
    """

    def __init__(
        self, params: list[list[torch.Tensor]], twins: dict[int, Twin], states: _States, plain_states: _States
    ) -> None:
        self.plain_states = plain_states
        self.seen = [[twins[id(one)].plain if id(one) in twins else one for one in group] for group in params]
        self.pairs = [(twin.parameter, twin.plain) for twin in twins.values()]
        self._params = [*chain.from_iterable(params)]
        self._sizes = [*map(len, params)]
        self._sharded = [parameter for parameter, _ in self.pairs]
        self._plain = [plain for _, plain in self.pairs]
        self._locals = [twin.local for twin in twins.values()]
        self._lacks_gradient = [not twin.had_gradient for twin in twins.values()]
        self._placements = [getattr(parameter.grad, "placements", None) for parameter in self._sharded]
        self._contents = _all_contents(states)
        self._plain_contents = _all_contents(plain_states)

    def lend_gradients(self, params: list[list[torch.Tensor]], states: _States) -> bool:
        """Gives the twins the gradients of a step that is like this one; returns False if it is not."""
        gradients = [*map(_gradient_of, self._sharded)]
        if not (
            [*map(len, params)] == self._sizes
            and all(map(is_, chain.from_iterable(params), self._params))
            and all(map(is_, map(local_of, self._sharded), self._locals))
            and [*map(is_, gradients, repeat(None))] == self._lacks_gradient
            and [*map(getattr, gradients, repeat("placements"), repeat(None))] == self._placements
            and _all_contents(states) == self._contents
        ):
            return False
        self._set_gradients(None if one is None else local_of(one) for one in gradients)
        return True

    def take_gradients_back(self, plain_states: _States) -> bool:
        """After a step that was like this one; returns False if it has changed states or dropped gradients."""
        lacks_gradient = [*map(is_, map(_gradient_of, self._plain), repeat(None))]
        if lacks_gradient != self._lacks_gradient or plain_states is not self.plain_states:
            return False
        if _all_contents(plain_states) != self._plain_contents:
            return False
        self._set_gradients(repeat(None))
        return True

    def _set_gradients(self, gradients: Iterable[torch.Tensor | None]) -> None:
        deque(map(setattr, self._plain, repeat("grad"), gradients), maxlen=0)


class ShardSteps:
    """Values put aside while an optimizer steps on plain tensors, and the plain twins of its parameters."""

    def __init__(self) -> None:
        self._twins: dict[int, Twin] = {}
        self._params: list[list[torch.Tensor]] | None = None
        self._by_block = False  # of the optimizer that steps
        self._state: _States = defaultdict(dict)
        self._last: _LastStep | None = None

    @no_dynamo
    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Step pre-hook: gives the optimizer plain tensors, unless a closure will run forward and backward."""
        if (args and args[-1] is not None and callable(args[-1])) or kwargs.get("closure") is not None:
            return None
        self.lend(optimizer)
        return None

    def lend(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces the parameters by their plain twins, with their state."""
        params_of = [group["params"] for group in optimizer.param_groups]
        last = self._last
        if last is not None and last.lend_gradients(params_of, optimizer.state):
            seen = [[*params] for params in last.seen]
            states, pairs = last.plain_states, last.pairs
        else:
            last = self._last = None  # what it holds may be replaced, or be freed
            seen, states = self._lend_each(optimizer, params_of)
            pairs = [(twin.parameter, twin.plain) for twin in self._twins.values()]
        self._params, self._state = params_of, optimizer.state  # from here on `end` undoes this
        for group, params in zip(optimizer.param_groups, seen, strict=True):
            group["params"] = params
        optimizer.state = states
        carry_overrides(optimizer, pairs)

    def _lend_each(
        self, optimizer: torch.optim.Optimizer, params_of: list[list[torch.Tensor]]
    ) -> tuple[list[list[torch.Tensor]], _States]:
        """The parameters of each group as the optimizer sees them, and their states."""
        self._by_block = steps_by_block(optimizer)
        used: dict[int, Twin] = {}
        states: _States = defaultdict(dict)
        try:
            seen = [[self.seen_by(optimizer, parameter, used) for parameter in params] for params in params_of]
            for key, state in optimizer.state.items():
                twin = used.get(id(key))
                if twin is None:
                    states[key] = state
                elif state:
                    states[twin.plain] = twin.state_for_step(optimizer, state)
        except BaseException:  # the next step may be one without plain tensors
            for twin in used.values():
                twin.plain.grad = None
            raise
        self._twins = used
        return seen, states

    def seen_by(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, used: dict[int, Twin]) -> torch.Tensor:
        """The optimizer's view of a parameter: a plain twin with its gradient (noted in `used`), or itself."""
        if not isinstance(parameter, DTensor):
            return parameter
        if self._by_block and not local_of(parameter).numel() and any(map(is_ours, parameter.placements)):
            return self.passed_over(optimizer, parameter, used)
        twin = self.twin_of(optimizer, parameter, used)
        twin.take_gradient()
        return twin.plain

    def passed_over(self, optimizer: torch.optim.Optimizer, parameter: DTensor, used: dict[int, Twin]) -> torch.Tensor:
        """The twin, without a gradient, of a parameter that other ranks hold; loaded state is removed."""
        optimizer.state.pop(parameter, None)  # from before another rank changed it
        twin = self.twin_of(optimizer, parameter, used)
        twin.plain.grad = None
        twin.had_gradient = False
        return twin.plain

    def twin_of(self, optimizer: torch.optim.Optimizer, parameter: DTensor, used: dict[int, Twin]) -> Twin:
        """The twin of the last step, if the parameter still has the same shard, or a new one."""
        twin = self._twins.get(id(parameter))
        if twin is None or twin.parameter is not parameter or twin.local is not local_of(parameter):
            param = sharded_counterpart(parameter)
            check_blocks(optimizer, parameter, "?" if param is None else param.fqn)
            twin = Twin(parameter)
        used[id(parameter)] = twin
        return twin

    def forget(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Before other state is loaded: drops the old state."""
        self._twins.clear()
        self._last = None

    @no_dynamo
    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Step post-hook: restores the parameters, with the new state."""
        if self._params is None:
            return
        plain_states: _States = optimizer.state
        optimizer.state = self._state
        if self._last is None or not self._last.take_gradients_back(plain_states):
            self._last = None
            seen = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            # A gradient may have decided that the step sees a DTensor. After Ctrl-C in `lend` it sees all of them.
            sees_plain = plain_states is not self._state and not any(isinstance(one, DTensor) for one in seen)
            if self._take_each_back(plain_states) and sees_plain:
                self._last = _LastStep(self._params, self._twins, self._state, plain_states)
        for group, params in zip(optimizer.param_groups, self._params, strict=True):
            group["params"] = params
        self._params = None
        self._state = defaultdict(dict)

    def _take_each_back(self, plain_states: _States) -> bool:
        """Takes states and gradients back; returns whether the step has left all states and gradients in place."""
        in_place = True
        twins = {id(twin.plain): twin for twin in self._twins.values()}
        for key, state in plain_states.items():
            twin = twins.get(id(key))
            if twin is None:
                self._state[key] = state
            elif twin.take_state(self._state[twin.parameter], state):
                in_place = False
        for twin in twins.values():
            if twin.had_gradient and twin.plain.grad is None:  # the optimizer has dropped it
                twin.parameter.grad = None
                in_place = False
            twin.plain.grad = None
        return in_place
