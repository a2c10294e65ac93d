"""Tensors inside the arguments and outputs of a forward: lists, tuples, dicts and dataclasses of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["cast_floating", "map_tensors", "tensors_in", "tensors_with_grad"]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor replaced by `function` of it; containers are copied, everything else is passed on."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    kind = type(value)
    if kind is tuple or kind is list:  # nearly always; the other tests are dear
        return kind([map_tensors(function, one) for one in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        # A dataclass that is a dict too (model outputs of Hugging Face) keeps both in step in its own __setattr__.
        assign = setattr if isinstance(value, dict) else object.__setattr__
        for field in dataclasses.fields(value):
            assign(result, field.name, map_tensors(function, getattr(value, field.name)))
        return result
    if isinstance(value, dict):
        mapping = copy.copy(value)
        for key, one in value.items():
            mapping[key] = map_tensors(function, one)
        return mapping
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, one) for one in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(map_tensors(function, one) for one in value)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, each as often as it stands there."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def tensors_with_grad(value: Any) -> list[torch.Tensor]:
    """The tensors in `value` that require grad, each as often as it stands there."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    kind = type(value)
    if kind is tuple or kind is list:
        for one in value:
            _collect(one, found)
    elif isinstance(value, torch.Tensor):
        found.append(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), found)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            _collect(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, found)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor cast to `dtype`."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, value)
