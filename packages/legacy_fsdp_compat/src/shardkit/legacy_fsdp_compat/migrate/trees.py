"""Nested dicts and lists taken apart into leaves with the keys that lead to them, and put together again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardkit.core.checkpoint.leaves import At
from shardkit.core.checkpoint.stored import Checkpoint, StoredTensor

__all__ = ["Path_", "fill", "paths_of", "places_of", "tree_of"]

Path_ = tuple[Any, ...]
"""The keys that lead to a leaf: keys of dicts as they are, also numbers, and an `At` for each list."""

_SEQUENCES = {"list": list, "tuple": tuple}


def paths_of(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Leaves with the keys that lead there. Leaves are tensors, empty dicts, and everything that holds no tensors and
    is no plain dict: a Counter stays a Counter.
    """
    if _is_taken_apart(value):
        for key, below in value.items():
            yield from paths_of(below, (*path, key))
    elif type(value) in (list, tuple) and _holds_tensors(value):
        for number, below in enumerate(value):
            yield from paths_of(below, (*path, At(number, type(value).__name__)))
    else:
        yield path, value


def _is_taken_apart(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    return type(value) in (dict, OrderedDict) or _holds_tensors(value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(below) for below in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensors(below) for below in value)
    return isinstance(value, torch.Tensor | StoredTensor)


class _Level(dict[Any, Any]):
    """A dict or list on the way, told from a leaf that is a dict."""


def tree_of(leaves: Mapping[Path_, Any]) -> dict[str, Any]:
    """The nested dicts and lists that `paths_of` took apart."""
    tree = _Level()
    for path, value in leaves.items():
        place = tree
        for key in path[:-1]:
            place = place.setdefault(key, _Level())
        place[path[-1]] = value
    return _closed(tree)  # type: ignore[no-any-return]


def _closed(level: Any) -> Any:
    if not isinstance(level, _Level):
        return level
    if level and all(isinstance(key, At) for key in level):
        items = sorted(level, key=lambda item: item.at)
        return _SEQUENCES[items[0].of](_closed(level[item]) for item in items)
    return {key: _closed(below) for key, below in level.items()}


def fill(checkpoint: Checkpoint, leaves: Iterable[tuple[Path_, Any]]) -> Checkpoint:
    """Puts leaves in: stored tensors, and everything else as objects."""
    for path, value in leaves:
        if isinstance(value, StoredTensor):
            checkpoint.tensors[path] = value
        else:
            checkpoint.objects[path] = value
    return checkpoint


@dataclass(frozen=True)
class _Place:
    """Stands where a tensor does."""

    path: Path_


def places_of(checkpoint: Checkpoint) -> Iterator[Path_]:
    """The paths of the tensors in the order in which a pickle of the whole tree has them."""
    places: dict[Path_, Any] = {path: _Place(path) for path in checkpoint.tensors}
    return _places(tree_of({**places, **dict.fromkeys(checkpoint.objects)}))


def _places(tree: Any) -> Iterator[Path_]:
    if isinstance(tree, _Place):
        yield tree.path
    elif isinstance(tree, dict | list | tuple):
        for below in tree.values() if isinstance(tree, dict) else tree:
            yield from _places(below)
