"""Optimizer state by the names of parameters: what `get_optimizer_state_dict` gives, without its step.

Stock fills an optimizer that has no state yet by letting it take a step, after which it counts one step more than it
took. Here state is named as it is, and state that is read is made of the checkpoint's entries.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardkit.core.checkpoint.errors import CheckpointError

__all__ = ["OptimizerNames"]

# What wrappers add to names, and stock's state dicts leave out.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
# State of torch's optimizers that is one number for a whole parameter, a 0-dim one included.
_NUMBERS = {"step", "eta", "mu", "mu_product"}


@dataclass(frozen=True)
class OptimizerNames:
    """Optimizers of a model, whose parameters have names."""

    optimizers: tuple[Optimizer, ...]
    name_of: Mapping[int, str]

    @classmethod
    def of(cls, model: nn.Module, optimizers: Iterable[Optimizer]) -> OptimizerNames:
        """Raises ValueError if an optimizer holds a parameter that the model has not."""
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        names: dict[int, str] = {}
        for name, parameter in inner.named_parameters():
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            names[id(parameter)] = name
        found = cls(tuple(optimizers), names)
        for number, optimizer in enumerate(found.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in names:
                        raise ValueError(
                            f"optimizer {number} holds a parameter of shape {tuple(parameter.shape)} that is none of "
                            "the model's: build it from model.parameters(), after fully_shard"
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
        """The tensor to read one entry into: the live one, else a new one that lies as its parameter does.

        Raises:
            CheckpointError: if the parameter is unknown, or the entry has a shape of its own.
        """
        if name not in self._by_name:
            raise CheckpointError(f"optimizer.state.{name}: the optimizer holds no parameter of this name")
        optimizer, parameter = self._by_name[name]
        live = optimizer.state.get(parameter, {}).get(key)
        if isinstance(live, torch.Tensor) and tuple(live.shape) == shape and live.dtype == dtype:
            return live
        if not shape and (key in _NUMBERS or parameter.ndim):
            return torch.zeros((), dtype=dtype, device="cpu")
        if tuple(parameter.shape) == shape:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        raise CheckpointError(
            f"optimizer.state.{name}.{key} has shape {shape}, its parameter {tuple(parameter.shape)}: take a step, "
            "so that the optimizer has state to read into, then restore"
        )

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
        """Gives each optimizer its part of what `state_dict` gave, as read.

        Raises:
            CheckpointError: for parameters that are in no stored group, or in several.
        """
        state, groups = stored.get("state", {}), stored.get("param_groups", [])
        loads = []
        for optimizer in self.optimizers:
            numbered, options, count = {}, [], 0
            for group in optimizer.param_groups:
                names = [self.name_of[id(parameter)] for parameter in group["params"]]
                found = _group_of(names, groups)
                for number, name in enumerate(names, start=count):
                    if name in state:
                        numbered[number] = state[name]
                options.append({**found, "params": list(range(count, count + len(names)))})
                count += len(names)
            loads.append((optimizer, {"state": numbered, "param_groups": options}))
        for optimizer, load in loads:
            optimizer.load_state_dict(load)


def _group_of(names: list[str], groups: list[Any]) -> dict[str, Any]:
    """The stored group that has all of these parameters."""
    for group in groups:
        if set(names) <= set(group.get("params", ())):
            return dict(group)
    raise CheckpointError(
        f"no parameter group of the checkpoint has {', '.join(names[:3])}{' ...' if len(names) > 3 else ''} together; "
        "build the optimizer with the parameter groups that it was saved with"
    )
