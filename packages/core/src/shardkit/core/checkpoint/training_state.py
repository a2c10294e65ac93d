"""What a checkpoint is of: the parts of a training run, as leaves under names that do not depend on the ranks.

Optimizer state goes by the names of parameters, as `get_optimizer_state_dict` has it, without its step: stock fills an
optimizer that has no state yet by letting it take a step, after which it counts one step more than it took. Here state
is named as it is, and state that is read is made of the checkpoint's entries.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardkit.core.block_steps import target_by_block
from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, Leaves, flatten
from shardkit.core.placements import Owned
from shardkit.core.whole_state import NUMBERS


def get_rng_state() -> dict[str, Any]:
    """All generators, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `get_rng_state` gave; a generator that is missing there stays as it is."""
    try:
        if "cpu" in state:
            torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if "python" in state:
            random.setstate(state["python"])
        if "numpy" in state:
            kind, keys, position, has_gauss, gauss = state["numpy"]
            np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(f"rng: the state of a random generator does not fit: {error}") from error


# What wrappers add to names, and stock's state dicts leave out.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class OptimizerNames:
    """Optimizers of a model, whose parameters have names."""

    optimizers: tuple[Optimizer, ...]
    name_of: Mapping[int, str]

    @classmethod
    def of(cls, model: nn.Module, optimizers: Iterable[Optimizer]) -> OptimizerNames:
        """Raises ValueError if an optimizer holds a parameter that the model has not, or another optimizer too."""
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        names: dict[int, str] = {}
        for name, parameter in inner.named_parameters():
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            names[id(parameter)] = name
        found = cls(tuple(optimizers), names)
        holder: dict[int, int] = {}
        for number, optimizer in enumerate(found.optimizers):
            for parameter in (*(one for group in optimizer.param_groups for one in group["params"]), *optimizer.state):
                if id(parameter) not in names:
                    what = (
                        f"a parameter of shape {tuple(parameter.shape)}" if hasattr(parameter, "shape") else parameter
                    )
                    raise ValueError(
                        f"optimizer {number} holds {what} that is none of the model's: build it from "
                        "model.parameters(), after fully_shard"
                    )
                if holder.setdefault(id(parameter), number) != number:
                    raise ValueError(
                        f"{names[id(parameter)]}: both optimizer {holder[id(parameter)]} and optimizer {number} hold "
                        "it, and a checkpoint has one state for each parameter; share the parameters out"
                    )
        return found

    def state_dict(self) -> dict[str, Any]:
        """State by name and parameter groups that name their parameters; tensors are the live ones."""
        state: dict[str, Any] = {}
        groups = []
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                state[self.name_of[id(parameter)]] = dict(values)
            for group in optimizer.param_groups:
                names = [self.name_of[id(parameter)] for parameter in group["params"]]
                groups.append({**group, "params": names})
        return {"state": state, "param_groups": groups}

    def target(self, name: str, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor to read one entry into: the live one, else a new one that lies as its parameter does. Raises
        CheckpointError if the parameter is unknown, or the entry has a shape of its own.
        """
        if name not in self._by_name:
            raise CheckpointError(f"optimizer.state.{name}: the optimizer holds no parameter of this name")
        optimizer, parameter = self._by_name[name]
        live = optimizer.state.get(parameter, {}).get(key)
        if isinstance(live, torch.Tensor) and tuple(live.shape) == shape and live.dtype == dtype:
            return live
        if not shape and (key in NUMBERS or parameter.ndim):
            return torch.zeros((), dtype=dtype, device="cpu")
        if tuple(parameter.shape) == shape:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if _is_owned(parameter):
            return torch.empty(shape, dtype=dtype, device="cpu")  # a plain tensor of its owner
        by_block = target_by_block(key, dtype, shape, parameter)
        if by_block is not None:
            return by_block
        raise CheckpointError(
            f"optimizer.state.{name}.{key} has shape {shape}, its parameter {tuple(parameter.shape)}: take a step, "
            "so that the optimizer has state to read into, then restore"
        )

    def nested_target(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The same for an entry deeper down, which can be of any shape: then it is read whole."""
        _, parameter = self._by_name[name]
        if tuple(parameter.shape) == shape and not _is_owned(parameter):
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device="cpu")

    @property
    def names(self) -> Collection[str]:
        """The parameters that the optimizers hold."""
        return self._by_name.keys()

    @functools.cached_property
    def _by_name(self) -> dict[str, tuple[Optimizer, torch.Tensor]]:
        return {
            self.name_of[id(parameter)]: (optimizer, parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def load(self, stored: Mapping[str, Any]) -> None:
        """Gives each optimizer its part of what `state_dict` gave, as read. Raises CheckpointError for parameters that
        are in no stored group, or in several.
        """
        state, groups = stored.get("state", {}), stored.get("param_groups", [])
        loads, number = [], 0
        for optimizer in self.optimizers:
            options = []
            for group in optimizer.param_groups:
                names = [self.name_of[id(parameter)] for parameter in group["params"]]
                found = _group_of(names, groups, number) if names else _empty_group(group, groups, number)
                options.append({**found, "params": names})
                number += 1
            loads.append((optimizer, options))
        for optimizer, options in loads:
            _load(optimizer, state, options)


def _is_owned(parameter: torch.Tensor) -> bool:
    """Whether one rank steps on it as a plain tensor: its nested state is plain."""
    return isinstance(parameter, DTensor) and any(isinstance(one, Owned) for one in parameter.placements)


def _load(optimizer: Optimizer, state: Mapping[str, Any], options: list[dict[str, Any]]) -> None:
    names = [name for group in options for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in options]
    optimizer.load_state_dict(
        {"state": {numbers[name]: state[name] for name in names if name in state}, "param_groups": groups}
    )
    for name, parameter in zip(
        names, (one for group in optimizer.param_groups for one in group["params"]), strict=True
    ):
        if name in state:
            optimizer.state[parameter] = _as_stored(optimizer.state[parameter], state[name])


def _as_stored(loaded: Any, stored: Any) -> Any:
    """What an optimizer has loaded, in the dtypes that were stored; it casts all but `step` to the parameter's."""
    if isinstance(stored, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == stored.dtype else stored.to(device=loaded.device)
    if isinstance(stored, dict) and isinstance(loaded, dict):
        return {key: one if key == "step" else _as_stored(one, stored.get(key)) for key, one in loaded.items()}
    if isinstance(stored, list) and isinstance(loaded, list) and len(stored) == len(loaded):
        return [_as_stored(*pair) for pair in zip(loaded, stored, strict=True)]
    return loaded


def _group_of(names: list[str], groups: list[Any], number: int) -> dict[str, Any]:
    """The stored group that has all of these parameters."""
    for group in groups:
        if set(names) <= set(group.get("params", ())):
            return dict(group)
    raise CheckpointError(
        f"no parameter group of the checkpoint has {', '.join(names[:3])}{' ...' if len(names) > 3 else ''} together "
        f"(group {number} of the optimizers); build the optimizer with the parameter groups that it was saved with"
    )


def _empty_group(own: Mapping[str, Any], groups: list[Any], number: int) -> dict[str, Any]:
    """What a group without parameters gets: the options of the stored one in its place, its own if that has some."""
    stored = groups[number] if number < len(groups) else own
    return dict(own if stored.get("params") else stored)


MODEL, OPTIMIZER, SCHEDULER, RNG = "model", "optimizer", "scheduler", "rng"


@dataclass(frozen=True)
class TrainingState:
    """A training run, for `CheckpointManager.save` and `restore`. The same on all ranks, but for `per_rank`.

    Attributes:
        model: sharded or not; its state dict goes under "model".
        optimizer: one, or several that share out the parameters; under "optimizer", by the names of parameters.
        scheduler: of the learning rate, or anything with `state_dict` and `load_state_dict`; under "scheduler".
        user: anything else with these two methods, under its key. Tensors in it may be DTensors. A value that is no
            tensor is stored once, as rank 0 has it.
        per_rank: the same for what differs from rank to rank, such as the position of a data loader; under
            "<key>.<rank>". It goes back to the same number of ranks only, unless the object has a method
            `load_state_dicts(states)`, which is then given the states of all ranks, by rank.
        rng: whether the random generators of each rank (torch's, Python's, numpy's) belong to it.

    Raises:
        ValueError: for a key that is one of the names above or no plain name.
    """

    model: nn.Module
    optimizer: Optimizer | Sequence[Optimizer] = ()
    scheduler: Stateful | None = None
    user: Mapping[str, Stateful] = field(default_factory=dict)
    per_rank: Mapping[str, Stateful] = field(default_factory=dict)
    rng: bool = True

    def __post_init__(self) -> None:
        taken = [MODEL, OPTIMIZER, SCHEDULER, RNG]
        for key in (*self.user, *self.per_rank):
            if key in taken or not key or "." in key:
                raise ValueError(f"key {key!r}: expected a name without dots that is not one of {', '.join(taken)}")
            taken.append(key)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All of them."""
        return (self.optimizer,) if isinstance(self.optimizer, Optimizer) else tuple(self.optimizer)

    def stateful(self) -> Iterator[tuple[str, Stateful]]:
        """Scheduler and user state, by key."""
        if self.scheduler is not None:
            yield SCHEDULER, self.scheduler
        yield from self.user.items()

    def capture(self, rank: int) -> Captured:
        """The leaves of everything as it is now; tensors are the live ones. Not collective.

        Raises:
            TypeError, ValueError: for state that cannot be stored, by name.
        """
        shared = flatten(get_model_state_dict(self.model), (MODEL,))
        if self.optimizers:
            names = OptimizerNames.of(self.model, self.optimizers)
            _add(shared, flatten(names.state_dict(), (OPTIMIZER,)))
        for key, one in self.stateful():
            _add(shared, flatten(one.state_dict(), (key,)))
        own = Leaves()
        for key, one in self.per_rank.items():
            _add(own, flatten(one.state_dict(), (key, str(rank))))
        if self.rng:
            _add(own, flatten(get_rng_state(), (RNG, str(rank))))
        parameters = tuple((MODEL, name) for name in OptimizerNames.of(self.model, ()).name_of.values())
        return Captured(shared, own, parameters)


@dataclass(frozen=True)
class Captured:
    """Leaves that all ranks have, and leaves of this rank alone; `parameters` are paths of the former."""

    shared: Leaves
    own: Leaves
    parameters: tuple[LeafPath, ...] = ()


def _add(to: Leaves, more: Leaves) -> None:
    to.values.update(more.values)
    to.empties.extend(more.empties)
