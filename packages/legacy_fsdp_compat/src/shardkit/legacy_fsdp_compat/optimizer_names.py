"""Maps between an optimizer's parameters, their numbers in it, their names and their units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardkit.core.parameters.param import sharded_counterpart
from shardkit.legacy_fsdp_compat.units import Unit, UnitParameter, clean_name

__all__ = ["NamedParameter", "ParameterNames", "key_of_each"]


@dataclass(frozen=True)
class NamedParameter:
    """One parameter of a model: under its first name, with its unit, if it has one."""

    fqn: str
    parameter: nn.Parameter
    unit: Unit | None
    managed: UnitParameter | None


class ParameterNames:
    """The parameters of a model that may hold FSDP modules, by name and by object."""

    def __init__(self, model: nn.Module) -> None:
        self.by_fqn: dict[str, NamedParameter] = {}
        self._by_id: dict[int, NamedParameter] = {}
        units: dict[int, tuple[Unit, UnitParameter]] = {}
        for module in model.modules():
            unit_of_module = module.__dict__.get("_unit")
            if isinstance(unit_of_module, Unit):
                units.update({id(one.sharded): (unit_of_module, one) for one in unit_of_module.parameters})
        for name, parameter in _parameters(model):
            unit, managed = units.get(id(parameter), (None, None))
            named = self._by_id.setdefault(id(parameter), NamedParameter(name, parameter, unit, managed))
            self.by_fqn[name] = named  # under all names of tied parameters

    @property
    def distinct(self) -> list[NamedParameter]:
        """Every parameter once, in order of the model."""
        return list(self._by_id.values())

    def of(self, parameter: torch.Tensor) -> NamedParameter:
        """The entry of a parameter that an optimizer holds.

        Raises:
            ValueError: if the parameter is not in the model.
        """
        param = sharded_counterpart(parameter)  # for an optimizer that was constructed before wrapping
        named = self._by_id.get(id(parameter if param is None else param.sharded_param))
        if named is None:
            raise ValueError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model; build it "
                "from model.parameters(), after wrapping the model in FSDP, and pass that model here"
            )
        return named


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                param = sharded_counterpart(parameter)
                fqn = clean_name(f"{prefix}.{name}" if prefix else name)
                yield fqn, parameter if param is None else param.sharded_param


def key_of_each(
    names: ParameterNames,
    optimizer: torch.optim.Optimizer | None,
    optim_input: Iterable[Any] | None,
    *,
    named_keys: Iterable[object] | None = None,
) -> dict[str, int | str]:
    """FQN -> the key of that parameter in the optimizer's state dict: its number.

    With `named_keys`, the keys of an optimizer that uses names, it is the name in the optimizer's spelling:
    `named_parameters()` includes the wrappers' name parts.

    `optim_input` is the argument that the optimizer was constructed with, for callers without an optimizer. Without
    either, it is assumed to be all parameters of the model.
    """
    if optimizer is not None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
    elif optim_input is None:
        parameters = [named.parameter for named in names.distinct]
    else:
        parameters = list(_flatten(optim_input))
    fqns = [names.of(parameter).fqn for parameter in parameters]
    if named_keys is None:
        return {fqn: number for number, fqn in enumerate(fqns)}
    spelled = {clean_name(key): key for key in named_keys if isinstance(key, str)}
    return {fqn: spelled.get(fqn, fqn) for fqn in fqns}


def _flatten(optim_input: Iterable[Any]) -> Iterator[torch.Tensor]:
    for item in optim_input:
        if isinstance(item, Mapping):
            params = item["params"]
            yield from [params] if isinstance(params, torch.Tensor) else params
        elif isinstance(item, tuple):
            yield item[1]
        else:
            yield item
