"""What a checkpoint holds, and in which order a pickle of it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shardkit.core.checkpoint.leaves import Path as LeafPath
from shardkit.core.checkpoint.leaves import unflatten
from shardkit.core.checkpoint.stored import Checkpoint, StoredTensor

__all__ = ["fill", "places_of"]


def fill(checkpoint: Checkpoint, leaves: Iterable[tuple[LeafPath, Any]]) -> Checkpoint:
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

    path: LeafPath


def places_of(checkpoint: Checkpoint) -> Iterator[LeafPath]:
    """The paths of the tensors in the order in which a pickle of the whole tree has them."""
    places: dict[LeafPath, Any] = {path: _Place(path) for path in checkpoint.tensors}
    return _places(unflatten({**places, **dict.fromkeys(checkpoint.objects)}))


def _places(tree: Any) -> Iterator[LeafPath]:
    if isinstance(tree, _Place):
        yield tree.path
    elif isinstance(tree, dict | list | tuple):
        for below in tree.values() if isinstance(tree, dict) else tree:
            yield from _places(below)
