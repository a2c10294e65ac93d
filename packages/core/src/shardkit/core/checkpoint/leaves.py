"""Nested state as named leaves, with the names that torch.distributed.checkpoint uses, and back.

Mappings, and lists that contain tensors or mappings, are flattened; everything else is a leaf. The name of a leaf is
its keys, joined by dots. Stock turns keys into strings and drops empty mappings. A `LeafPath` keeps the types of keys,
and `Leaves.empties` keeps the empty mappings, so a state is restored exactly.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError


@dataclass(frozen=True)
class At:
    """A place in a list, or in a tuple of tensors; a plain int in a path is a key of a mapping."""

    at: int  # the number of the item
    of: str = "list"  # "list" or "tuple"

    def __str__(self) -> str:
        return str(self.at)


LeafPath = tuple[Any, ...]
"""The keys that lead to a leaf: keys of mappings as they are, and an `At` for each place in a list."""

MODEL, OPTIMIZER, SCHEDULER, RNG = "model", "optimizer", "scheduler", "rng"
"""The first keys of a training run's leaves."""

_SEQUENCES = {"list": list, "tuple": tuple}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass
class Leaves:
    """The leaves of a state by path, in order, and the paths of its empty mappings."""

    values: dict[LeafPath, Any] = field(default_factory=dict)
    empties: list[LeafPath] = field(default_factory=list)


@dataclass(frozen=True)
class Captured:
    """Leaves shared by all ranks, and leaves of this rank alone; `parameters` are paths of the shared ones."""

    shared: Leaves
    own: Leaves
    parameters: tuple[LeafPath, ...] = ()


def name_of(path: LeafPath) -> str:
    """The flat name that torch.distributed.checkpoint gives to the value at `path`."""
    return ".".join(map(str, path))


def stock_path(path: LeafPath) -> tuple[str | int, ...]:
    """A path as torch.distributed.checkpoint's metadata has it: keys are strings, places in lists are numbers."""
    return tuple(part.at if isinstance(part, At) else str(part) for part in path)


def encode_path(path: LeafPath) -> list[Any]:
    """A path as JSON: a string key is a string, a number key a list with the number, a place in a list a number, and a
    place in a tuple {"tuple": number}.
    """

    def encoded(part: Any) -> Any:
        if isinstance(part, At):
            return part.at if part.of == "list" else {part.of: part.at}
        return [part] if isinstance(part, int) else part

    return [encoded(part) for part in path]


def decode_path(value: Any) -> LeafPath:
    """The path that `encode_path` encoded. Raises ValueError for anything else."""

    def decoded(part: Any) -> str | int | At:
        if isinstance(part, str):
            return part
        if isinstance(part, list) and len(part) == 1 and type(part[0]) is int:
            return part[0]
        at, of = (part.get("tuple"), "tuple") if isinstance(part, dict) and len(part) == 1 else (part, "list")
        if type(at) is not int or at < 0:
            raise ValueError(f"part {part!r} of a path")
        return At(at, of)

    if not isinstance(value, list) or not value:
        raise ValueError(f"path {value!r}")
    return tuple(map(decoded, value))


def walk(value: Any, is_opened: Callable[[Any], bool], path: LeafPath = ()) -> Iterator[tuple[LeafPath, Any]]:
    """The leaves of nested state with their paths, in order.

    `is_opened` is called with each mapping, list and tuple. If it returns False, the container is a leaf.
    """
    if isinstance(value, Mapping) and is_opened(value):
        for key, below in value.items():
            yield from walk(below, is_opened, (*path, key))
    elif isinstance(value, list | tuple) and is_opened(value):
        for number, below in enumerate(value):
            yield from walk(below, is_opened, (*path, At(number, type(value).__name__)))
    else:
        yield path, value


def flatten(state: Mapping[Any, Any], prefix: LeafPath = ()) -> Leaves:
    """The leaves of nested state. Raises TypeError if a key is neither str nor int or the state is not a mapping,
    ValueError if two leaves have one name.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{name_of(prefix)}: its state_dict() is a {type(state).__name__}, expected a dict; make it return one"
        )
    leaves = Leaves()
    seen: dict[str, LeafPath] = {}
    for path, value in walk(state, _is_taken_apart, prefix):
        for number, key in enumerate(path):
            if not isinstance(key, str | int | At) or isinstance(key, bool):
                where = name_of(path[:number])
                raise TypeError(f"{where}: the key {key!r} is a {type(key).__name__}, expected str or int; rename it")
        if isinstance(value, Mapping):
            leaves.empties.append(path)
            continue
        other = seen.setdefault(name_of(path), path)
        if other != path:
            raise ValueError(f"{name_of(path)}: two values have this name, at {other} and at {path}; rename one")
        leaves.values[path] = value
    return leaves


def _is_taken_apart(value: Any) -> bool:
    """Whether torch.distributed.checkpoint flattens a value: mappings, and lists that hold more than objects."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and any(
        isinstance(one, Mapping | torch.Tensor) or (isinstance(one, list) and _is_taken_apart(one)) for one in value
    )


class _Level(dict[Any, Any]):
    """A mapping or list above leaves; distinguishes it from a leaf that is a dict."""


def unflatten(values: Mapping[LeafPath, Any], empties: Iterable[LeafPath] = ()) -> Any:
    """Rebuilds the nested state that `walk` or `flatten` took apart; with an empty path, returns the value itself.
    Raises DamagedCheckpointError if a value's path is also a prefix of other paths.
    """
    root = _Level()
    for path, value in values.items():
        if not path:
            return value
        place = _level(root, path[:-1])
        there = place.get(path[-1])
        if not isinstance(there, _Level):
            place[path[-1]] = value
        elif type(value) is dict:
            there.update(value)
        else:
            raise DamagedCheckpointError(f"{name_of(path)}: is a value, and others lie below it")
    for path in empties:
        if path:  # another rank's may have been empty where this one's is not
            _level(root, path[:-1]).setdefault(path[-1], {})
    return _closed(root)


def _level(root: _Level, path: LeafPath) -> _Level:
    place = root
    for key in path:
        below = place.setdefault(key, _Level())
        if type(below) is dict:
            below = place[key] = _Level(below)
        if not isinstance(below, _Level):
            raise DamagedCheckpointError(f"{name_of(path)}: lies below '{key}', which is a value")
        place = below
    return place


def _closed(level: Any) -> Any:
    if not isinstance(level, _Level):
        return level
    if level and all(isinstance(key, At) for key in level):
        items = sorted(level, key=lambda item: item.at)
        return _SEQUENCES[items[0].of](_closed(level[item]) for item in items)
    return {key: _closed(below) for key, below in level.items()}


def object_bytes(name: str, value: Any) -> bytes:
    """The bytes that torch.save writes for a leaf that is not a tensor. Raises TypeError if
    `torch.load(weights_only=True)` would refuse them.
    """
    _check_plain(name, value)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _check_plain(name: str, value: Any) -> None:
    if type(value) in _PLAIN:
        if type(value) is bytes and not value:
            raise TypeError(f"{name}: bytes of length 0, which torch.load refuses to read; use None or a string")
        return
    if isinstance(value, DTensor):
        raise TypeError(f"{name}: a DTensor inside a tuple or set; put it into a dict or a list, to be sharded")
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        check_has_values(name, value)
        return
    if type(value) in (dict, OrderedDict):
        for key, below in value.items():
            _check_plain(name, key)
            _check_plain(name, below)
    elif type(value) in (list, tuple, set):
        for below in value:
            _check_plain(name, below)
    else:
        raise TypeError(
            f"{name}: a {type(value).__module__}.{type(value).__qualname__} in the state, expected tensors, numbers, "
            "strings and plain containers of these: loading anything else could run code. Convert it in state_dict()"
        )


def check_has_values(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor on the meta device."""
    if tensor.device.type == "meta":
        raise TypeError(f"{name}: is on the meta device and has no values; call materialize on the model first")


class LeftOut:
    """Names of values to leave out, or of dicts with everything below: "rng", "optim.state.embed.weight"."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.keys = tuple(keys)
        self._found: set[str] = set()

    def has(self, path: LeafPath) -> bool:
        """Whether the value at `path` is left out."""
        name = name_of(path)
        found = [key for key in self.keys if name == key or name.startswith(f"{key}.")]
        self._found.update(found)
        return bool(found)

    def rest(self, leaves: Mapping[LeafPath, Any]) -> Iterator[tuple[LeafPath, Any]]:
        """The leaves that are not left out."""
        return ((path, value) for path, value in leaves.items() if not self.has(path))

    def check(self, source: object) -> None:
        """Raises `CheckpointError` for keys that matched nothing. Call it after reading all of a checkpoint."""
        if unknown := [key for key in self.keys if key not in self._found]:
            raise CheckpointError(
                f"{source} has no {', '.join(map(repr, unknown))}, which is to be left out; correct the name"
            )
