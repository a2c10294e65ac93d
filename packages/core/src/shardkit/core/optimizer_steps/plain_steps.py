"""Optimizer steps on plain tensors over the shards that a rank holds.

Note [Steps on plain tensors]
While an optimizer steps, its parameter groups and its state hold plain tensors over the memory of the DTensors that
they hold otherwise. Optimizers that need whole matrices (Muon, Shampoo) so run unmodified on `Owned`: the owner sees
the whole matrix, and other ranks an empty tensor without a gradient, which they skip. Element-wise optimizers save the
host time of DTensor operators; an element's update depends on it alone, and that of a block on the block, which begins
where the shard does. Nothing is communicated. `supported.py` says which optimizers see which parameters so.

Between the steps, state of the parameter's own shape is a DTensor, so that checkpoints know its placement. Other state
stays as the optimizer made it. Each step derives the plain state anew: nobody has to notice what users change or load.
Only the plain parameters stay the same objects, because optimizers may know them by identity.

torch's foreach and fused operators accept either plain tensors or DTensors of one mesh. So an element-wise optimizer of
torch sees plain tensors for all of its DTensors if it sees one.

Schedulers, gradient scalers, state dicts, closures and the user's step hooks see DTensors: a hook that clips gradients
would take the norm of a shard for that of all ranks. So our hooks are the innermost.

A step that raises runs no post-hook. The next step, state dict or forward of a root first restores everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from threading import get_ident
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardkit.core.optimizer_steps.block_steps import (
    carry_overrides,
    check_blocks,
    in_blocks,
    inner_tensors,
    join_parts,
    parts_of,
)
from shardkit.core.optimizer_steps.supported import lacks_state_somewhere, steps_on_empty
from shardkit.core.parameters.param import fqn_of, user_attributes
from shardkit.core.torch_compat import (
    hook_innermost,
    is_gathered_by_torch,
    is_within_step,
    lies_like,
    like_dtensor,
    local_of,
    no_dynamo,
)

_States: TypeAlias = defaultdict[Any, dict[str, Any]]

STEPS = "_shardkit_plain_steps"  # of the optimizer, which neither pickles nor copies it

_NOTHING = object()

NUMBERS = {"step", "eta", "mu", "mu_product"}
"""State of torch's optimizers that is one number for a whole parameter, even for a 0-dim one."""

lent: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
"""Optimizers that hold other tensors than between steps, as they step, or a step has raised; and the thread of that."""


class Twin:
    """A sharded parameter, and the plain one over its shard."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: DTensor) -> None:
        check_blocks(optimizer, parameter)
        self.parameter = parameter
        self.local = local_of(parameter)
        self.plain = nn.Parameter(self.local, requires_grad=parameter.requires_grad)
        self.plain.__dict__.update(user_attributes(parameter))
        self.steps = bool(self.local.numel()) or steps_on_empty(optimizer, parameter)
        self.joined: dict[str, torch.Tensor] = {}  # torchao's state, whose parts are separate entries between the steps
        # During a step: the state between the steps, and its plain values as they were lent.
        self.state: dict[str, Any] = {}
        self.lent: dict[str, Any] = {}

    def gradient(self) -> torch.Tensor | None:
        """The gradient for a step; None where other ranks hold the parameter and the optimizer would skip it."""
        gradient = self.parameter.grad if self.steps else None
        if gradient is None:
            return None
        if not lies_like(gradient, self.parameter):
            raise RuntimeError(
                f"parameter '{fqn_of(self.parameter)}' of shape {tuple(self.parameter.shape)} with placements "
                f"{self.parameter.placements} has a gradient with {getattr(gradient, 'placements', 'none')}, and the "
                "optimizer steps on plain tensors; redistribute the gradient before the step"
            )
        return local_of(gradient)

    def refuse_whole_state(self, state: dict[str, Any]) -> None:
        """A rank may hold all of a parameter: its state of one process would be stepped on, and saved as its own."""
        for key, value in state.items():
            plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and key not in NUMBERS
            if plain and value.ndim and value.shape == self.parameter.shape:
                raise RuntimeError(
                    f"state '{key}' of parameter '{fqn_of(self.parameter)}' is that of the whole, as of one process, "
                    f"and its placements are {self.parameter.placements}. Load it from a checkpoint of "
                    "CheckpointManager or torch.distributed.checkpoint"
                )

    def lend_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        plain = {key: local_of(value) if isinstance(value, DTensor) else value for key, value in state.items()}
        for key in join_parts(optimizer, plain, self.local, self.joined):
            state.update(self._entries(key, plain[key]))  # over the same memory, even if it was cast
        self.state, self.lent = state, dict(plain)
        return plain

    def take_state(self, plain: dict[str, Any]) -> dict[str, Any]:
        """The state that was lent, with all that a step has added to its plain values, replaced there or removed."""
        state, lent = self.state, self.lent
        if plain.keys() == lent.keys() and all(map(is_, plain.values(), lent.values())):
            return state
        for key in [key for key, value in lent.items() if plain.get(key, _NOTHING) is not value]:
            for name in inner_tensors(lent[key]) or ():
                state.pop(f"{key}.{name}", None)
            state.pop(key, None)
        for key, value in plain.items():
            if lent.get(key, _NOTHING) is not value:
                state.update(self._entries(key, value))
        return state

    def _entries(self, key: str, value: Any) -> dict[str, Any]:
        """A value of plain state as it is between the steps."""
        parts = parts_of(key, value, self.parameter)
        if parts is not None:
            self.joined[key] = value
            return parts
        if (by_block := in_blocks(key, value, self.parameter)) is not None:
            return {key: by_block}
        sharded = isinstance(value, torch.Tensor) and key not in NUMBERS and value.shape == self.local.shape
        return {key: like_dtensor(value, self.parameter) if sharded else value}


class PlainSteps:
    """The steps of one optimizer. `chosen` has the ids of the parameters that it sees as plain tensors."""

    def __init__(self) -> None:
        self.chosen: frozenset[int] = frozenset()
        self._twins: dict[int, Twin] = {}  # of the last step
        self._put_aside: tuple[list[list[torch.Tensor]], _States] | None = None
        self._handles: list[RemovableHandle] = []
        self._state_left = 0  # the id of the optimizer's state after the last step: a load replaces it

    @property
    def is_lent(self) -> bool:
        return self._put_aside is not None

    def hook_innermost(self, optimizer: torch.optim.Optimizer) -> None:
        self.leave()
        self._handles = hook_innermost(optimizer, self._begin, self._end)

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()

    @no_dynamo
    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Step pre-hook: gives the optimizer plain tensors, and a closure that runs on DTensors."""
        if self.is_lent or not self.chosen:
            return None
        self._lend(optimizer)
        return self._with_closure(optimizer, args, kwargs)

    @no_dynamo
    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_lent and not is_within_step(optimizer):
            self.give_back(optimizer)

    def _with_closure(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        by_name = kwargs.get("closure") is not None
        closure = kwargs["closure"] if by_name else args[1] if len(args) > 1 else None
        if not callable(closure):
            return None

        def run() -> Any:
            self.give_back(optimizer)
            result = closure()
            self._lend(optimizer)
            return result

        return (args, {**kwargs, "closure": run}) if by_name else ((args[0], run, *args[2:]), kwargs)

    def _lend(self, optimizer: torch.optim.Optimizer) -> None:
        params_of = [group["params"] for group in optimizer.param_groups]
        twins: dict[int, Twin] = {}
        for one in chain.from_iterable(params_of):
            if id(one) in self.chosen:
                twins[id(one)] = self.twin_of(optimizer, one)
        gradients = [twin.gradient() for twin in twins.values()]
        if id(optimizer.state) != self._state_left:  # bitsandbytes loads without hooks
            for twin in twins.values():
                twin.refuse_whole_state(optimizer.state.get(twin.parameter, {}))
        plain_state: _States = defaultdict(dict)
        for key, state in optimizer.state.items():
            if (found := twins.get(id(key))) is None:
                plain_state[key] = state
            elif found.steps:  # what was loaded elsewhere is from before another rank changed it
                plain_state[found.plain] = found.lend_state(optimizer, state)
        self._twins, self._put_aside = twins, (params_of, optimizer.state)
        lent[optimizer] = get_ident()
        optimizer.state = plain_state
        for group, params in zip(optimizer.param_groups, params_of, strict=True):
            group["params"] = [one if (found := twins.get(id(one))) is None else found.plain for one in params]
        for twin, gradient in zip(twins.values(), gradients, strict=True):
            twin.plain.grad = gradient
        carry_overrides(optimizer, ((twin.parameter, twin.plain) for twin in twins.values()))

    def twin_of(self, optimizer: torch.optim.Optimizer, parameter: DTensor) -> Twin:
        """The same twin as before, unless the parameter lies in other memory or was frozen."""
        twin = self._twins.get(id(parameter))
        if (
            twin is not None
            and twin.parameter is parameter
            and twin.local is local_of(parameter)
            and twin.plain.requires_grad == parameter.requires_grad
        ):
            return twin
        return Twin(optimizer, parameter)

    def give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """If the optimizer holds plain tensors: restores the parameters, and takes over what has become of the rest."""
        if self._put_aside is None:
            return
        (params_of, state), self._put_aside = self._put_aside, None
        lent.pop(optimizer, None)
        plain_state = dict(optimizer.state)
        optimizer.state = state
        self._state_left = id(state)
        for group, params in zip(optimizer.param_groups, params_of, strict=True):
            group["params"] = params
        twins = {id(twin.plain): twin for twin in self._twins.values()}
        state.clear()
        for key, values in plain_state.items():
            if (twin := twins.get(id(key))) is None:
                state[key] = values
            else:
                state[twin.parameter] = twin.take_state(values)
        for twin in twins.values():
            if twin.steps and twin.plain.grad is None:  # the optimizer has dropped it
                twin.parameter.grad = None
            twin.plain.grad = None
            twin.state, twin.lent = {}, {}

    def place_state(self, state: Mapping[torch.Tensor, Sequence[DTensor]]) -> None:
        """Moves new state of parameters, before it has values, to where their state lies: nowhere else, here."""

    def forget_joined(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        for twin in self._twins.values():
            twin.joined.clear()


def plain_steps_of(optimizer: torch.optim.Optimizer, *, make: bool = False) -> PlainSteps | None:
    steps: PlainSteps | None = optimizer.__dict__.get(STEPS)
    if steps is None and make:
        use_steps(optimizer, steps := PlainSteps())
    return steps


def use_steps(optimizer: torch.optim.Optimizer, steps: PlainSteps) -> None:
    """Gives an optimizer its steps on plain tensors, in the place of those that it had."""
    former: PlainSteps | None = optimizer.__dict__.get(STEPS)
    if former is not None:
        former.leave()
    optimizer.__dict__[STEPS] = steps
    optimizer.register_load_state_dict_pre_hook(steps.forget_joined)
    optimizer.register_state_dict_pre_hook(steps.give_back)
    optimizer.register_state_dict_post_hook(_refuse_gathering)


def restore_interrupted_steps() -> None:
    """Ends steps of this thread that have raised; others may be stepping."""
    for optimizer in [one for one, thread in list(lent.items()) if thread == get_ident()]:
        optimizer.__dict__[STEPS].give_back(optimizer)


def _refuse_gathering(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """State dict post-hook: torch would wait forever for state that other ranks lack."""
    if is_gathered_by_torch() and lacks_state_somewhere(optimizer):
        raise RuntimeError(
            f"some ranks have no state of {type(optimizer).__name__}, as others own the parameter or hold all of its "
            "blocks, and torch's get_optimizer_state_dict with full_state_dict=True gathers from all ranks. Save "
            "without full_state_dict, or with CheckpointManager"
        )
