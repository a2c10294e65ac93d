"""Nested state as named leaves, under the names that torch.distributed.checkpoint gives them, and back.

A mapping is descended into, and so is a list that holds tensors or mappings; everything else is a leaf. The name of a
leaf is the keys that lead to it, joined by dots. Stock turns keys into strings and drops empty mappings; a `Path` keeps
the one and `Leaves.empties` the other, so that a state comes back as it was.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.errors import DamagedCheckpointError
from shardkit.core.checkpoint.torch_files import load_torch_bytes

__all__ = [
    "At",
    "Leaves",
    "Path",
    "check_has_values",
    "flatten",
    "name_of",
    "object_bytes",
    "object_from",
    "stock_path",
    "unflatten",
]


@dataclass(frozen=True)
class At:
    """A place in a list, or in a tuple of tensors; a plain int in a path is a key of a mapping.

    Attributes:
        at: the number of the item.
        of: "list" or "tuple".
    """

    at: int
    of: str = "list"

    def __str__(self) -> str:
        return str(self.at)


Path = tuple[str | int | At, ...]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass
class Leaves:
    """The leaves of a state by path, in order, and the paths of its empty mappings."""

    values: dict[Path, Any] = field(default_factory=dict)
    empties: list[Path] = field(default_factory=list)


def name_of(path: Path) -> str:
    """The flat name that torch.distributed.checkpoint gives to what lies at `path`."""
    return ".".join(map(str, path))


def stock_path(path: Path) -> tuple[str | int, ...]:
    """A path as torch.distributed.checkpoint's metadata has it: keys are strings, places in lists are numbers."""
    return tuple(part.at if isinstance(part, At) else str(part) for part in path)


def flatten(state: Mapping[Any, Any], prefix: Path = ()) -> Leaves:
    """The leaves of nested state.

    Raises:
        TypeError: for a key that is neither str nor int, or a state that is no mapping.
        ValueError: for two leaves of one name.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"{name_of(prefix)}: its state_dict() is a {type(state).__name__}, expected a dict")
    leaves = Leaves()
    _walk(prefix, state, leaves)
    seen: dict[str, Path] = {}
    for path in leaves.values:
        other = seen.setdefault(name_of(path), path)
        if other != path:
            raise ValueError(f"{name_of(path)}: two values have this name, at {other} and at {path}; rename one")
    return leaves


def _walk(path: Path, value: Any, leaves: Leaves) -> None:
    if isinstance(value, Mapping):
        if not value:
            leaves.empties.append(path)
        for key, below in value.items():
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(f"{name_of(path)}: the key {key!r} is a {type(key).__name__}, expected str or int")
            _walk((*path, key), below, leaves)
    elif isinstance(value, list) and _holds_more_than_objects(value):
        for number, below in enumerate(value):
            _walk((*path, At(number)), below, leaves)
    else:
        leaves.values[path] = value


def _holds_more_than_objects(value: list[Any]) -> bool:
    return any(
        isinstance(one, Mapping | torch.Tensor) or (isinstance(one, list) and _holds_more_than_objects(one))
        for one in value
    )


def unflatten(values: Mapping[Path, Any], empties: Iterable[Path] = ()) -> Any:
    """The nested state that `flatten` took apart; the value itself if its path is empty."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        if not path:
            return value
        _place(root, path)[path[-1]] = value
    for path in empties:
        if path:
            _place(root, path).setdefault(path[-1], {})  # another rank's may have been empty where this one's is not
    return _with_lists(root)


def _place(root: dict[Any, Any], path: Path) -> dict[Any, Any]:
    place = root
    for key in path[:-1]:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise DamagedCheckpointError(f"{name_of(path)}: lies below '{key}', which is a value")
    return place


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    below = {key: _with_lists(value) for key, value in tree.items()}
    if below and all(isinstance(key, At) for key in below):
        return [below[key] for key in sorted(below, key=lambda key: key.at)]
    return below


def object_bytes(name: str, value: Any) -> bytes:
    """What torch.save writes for a leaf that is no tensor.

    Raises:
        TypeError: for what `torch.load(weights_only=True)` would refuse.
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
        raise TypeError(f"{name}: is on the meta device and has no values; materialize the model first")


def object_from(name: str, data: bytes) -> Any:
    """The value of a leaf that is no tensor; nothing in `data` is run.

    Raises:
        CheckpointError: if it is anything but plain values.
    """
    return load_torch_bytes(data, name)
