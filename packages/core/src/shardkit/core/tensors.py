"""Tensors in the arguments and outputs of a forward, and tensors that it keeps on its modules."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
from collections.abc import Callable
from operator import is_not
from typing import Any

import torch
from torch import nn

from shardkit.core.torch_compat import NOTES_ON_MODULES

# Entries that every module has in its __dict__: hooks, parameters, children, and those added by sharding.
_OF_ANY_MODULE = frozenset({*nn.Module().__dict__, *NOTES_ON_MODULES})
_NO_TENSORS = frozenset({bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})
_HOLDERS = (torch.Tensor, dict, list, tuple, set, frozenset, types.FunctionType)

# How many of the newest entries of a list or dict on a module are checked, and how deep.
_NEWEST = 64
_DEEPEST = 4


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], value: Any, done: dict[int, Any] | None = None
) -> Any:
    """`value` with every tensor replaced by `function` of it. Containers in which something is replaced are copied,
    once each: `done` has them by the id of the original. All others are passed on, so additions by forward are visible
    to all their holders.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    kind = type(value)
    if kind is dict and not value:  # most forwards have no keyword arguments
        return value
    done = {} if done is None else done
    if kind is tuple:  # nearly always; the remaining checks are slow
        mapped = [map_tensors(function, one, done) for one in value]
        return tuple(mapped) if any(map(is_not, mapped, value)) else value
    if id(value) not in done:
        done[id(value)] = _map_container(function, value, done)
    return done[id(value)]


def _map_container(function: Callable[[torch.Tensor], torch.Tensor], value: Any, done: dict[int, Any]) -> Any:
    kind = type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_fields(function, value, done)
    if isinstance(value, dict):
        entries = {key: map_tensors(function, one, done) for key, one in value.items()}
        if not any(map(is_not, entries.values(), value.values())):
            return value
        mapping = copy.copy(value)
        for key, one in entries.items():
            mapping[key] = one
        return mapping
    if isinstance(value, list | tuple | set | frozenset):
        mapped = [map_tensors(function, one, done) for one in value]
        if not any(map(is_not, mapped, value)):
            return value
        return kind(*mapped) if hasattr(value, "_fields") else kind(mapped)
    return value


def _map_fields(function: Callable[[torch.Tensor], torch.Tensor], value: Any, done: dict[int, Any]) -> Any:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    mapped = {name: map_tensors(function, one, done) for name, one in fields.items()}
    if not any(map(is_not, mapped.values(), fields.values())):
        return value
    result = copy.copy(value)
    # A dataclass that is also a dict (model outputs of Hugging Face) keeps both in sync in its own __setattr__.
    assign = setattr if isinstance(value, dict) else object.__setattr__
    for name, one in mapped.items():
        assign(result, name, one)
    return result


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`; a repeated tensor is repeated."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def tensors_with_grad(value: Any) -> list[torch.Tensor]:
    """The tensors in `value` that require grad; a repeated tensor is repeated."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def tensors_kept_by(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The tensors in the attributes of `module`, including lists, dicts, dataclasses and closures there, by attribute.

    Excludes its parameters.
    """
    found: list[tuple[str, torch.Tensor]] = []
    attributes = module.__dict__
    for name in sorted(attributes.keys() - _OF_ANY_MODULE):
        kind: Any = type(attributes[name])
        if not _is_opaque(kind):
            kept: list[torch.Tensor] = []
            _reach(attributes[name], kept, _DEEPEST, into_objects=False)
            found += [(name, tensor) for tensor in kept]
    if module._buffers:
        found += [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
    return found


def reachable_tensors(value: Any) -> list[torch.Tensor]:
    """`tensors_in`, plus tensors in attributes of objects, and in closures of functions, in `value`."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    _reach(value, found, _DEEPEST, into_objects=True)
    return found


def _reach(value: Any, found: list[torch.Tensor], depth: int, *, into_objects: bool) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) not in _NO_TENSORS and depth:
        for one in _held_by(value, into_objects):
            _reach(one, found, depth - 1, into_objects=into_objects)


@functools.lru_cache(1024)
def _is_opaque(kind: type) -> bool:
    """Whether `_reach` finds nothing in objects of this class, unless it looks into all objects."""
    return kind in _NO_TENSORS or not (issubclass(kind, _HOLDERS) or dataclasses.is_dataclass(kind))


def _held_by(value: Any, into_objects: bool) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())[-_NEWEST:]
    if isinstance(value, list | tuple):
        return list(value[-_NEWEST:])
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, type | nn.Module | types.ModuleType):
        return []
    kind: Any = type(value)
    if not into_objects and _is_opaque(kind):
        return []
    held = list(getattr(value, "__dict__", {}).values())
    for base in type(value).__mro__:
        names = base.__dict__.get("__slots__", ())
        held += [getattr(value, name, None) for name in ((names,) if isinstance(names, str) else names)]
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                held.append(cell.cell_contents)
    elif isinstance(value, types.MethodType | types.BuiltinMethodType):
        held.append(value.__self__)
    return held


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor cast to `dtype`."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, value)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 view."""
    assert tensor.is_contiguous(), f"strides {tensor.stride()} of {tuple(tensor.shape)}: memory of others lies between"
    # A single element is contiguous whatever its strides are, but view(dtype) checks the strides.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
