"""Writes files of torch.save for several ranks at once, without ranks, filled in piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.archive import storages_in
from shardkit.core.checkpoint.leaves import Path as LeafPath
from shardkit.core.checkpoint.leaves import unflatten
from shardkit.core.checkpoint.memory import memory_of
from shardkit.legacy_fsdp_compat.migrate.model_shapes import Shapes
from shardkit.legacy_fsdp_compat.torch_compat import PickledShards

__all__ = ["Content", "Place", "RankWriter"]


@dataclass(frozen=True)
class Place:
    """Where elements [start, stop) of a tensor of the checkpoint go: into `memory`, from its element `first` on."""

    start: int
    stop: int
    memory: torch.Tensor
    first: int = 0


@dataclass(frozen=True)
class Content:
    """What one rank's file holds. Its tensors only have sizes: memory that is never touched is never there.

    Attributes:
        leaves: by path, what is pickled.
        places: by path of a tensor of the checkpoint, where the rank's part of it goes.
        padding: memory, first and last element, and what they are filled with.
    """

    leaves: dict[LeafPath, Any] = field(default_factory=dict)
    places: dict[LeafPath, Place] = field(default_factory=dict)
    padding: list[tuple[torch.Tensor, int, int, float]] = field(default_factory=list)


class RankWriter:
    """`rank0.pt` and so on. What lies in them says `content`.

    Attributes:
        file: the one that is laid out last.
        shapes: what it takes to read the files back.
    """

    shapes: Shapes | None = None

    def __init__(self, directory: Path, count: int) -> None:
        self._files = [directory / f"rank{rank}.pt" for rank in range(count)]
        self.file = self._files[0]
        self._targets: list[dict[LeafPath, tuple[Place, int]]] = []

    def content(self, rank: int) -> Content:
        """What `rank`'s file holds: the same at every call."""
        raise NotImplementedError

    def begin(self, records: dict[str, Any]) -> None:
        """Lays the files out, unless they are there with records in them."""
        if not records:
            for rank in reversed(range(len(self._files))):  # the first rank's last: with it all are there
                self._lay_out(self._files[rank], self.content(rank))
        self._targets = [_targets(file, self.content(rank)) for rank, file in enumerate(self._files)]

    @staticmethod
    def _lay_out(file: Path, content: Content) -> None:
        with torch.serialization.skip_data():
            torch.save(unflatten(content.leaves), file)
        offsets = _offsets(file, content)
        with file.open("r+b") as opened:
            for memory, first, last, value in content.padding:
                opened.seek(offsets[_storage(memory)] + first * memory.element_size())
                opened.write(memory_of(torch.full((last - first,), value, dtype=memory.dtype)))

    def write(self, path: LeafPath, slabs: Iterator[tuple[int, int, torch.Tensor]]) -> dict[str, Any]:
        """Writes one tensor into every file that has a part of it; returns its record."""
        for low, high, values in slabs:
            for file, targets in zip(self._files, self._targets, strict=True):
                if path not in targets:
                    continue
                place, offset = targets[path]
                start, stop = max(low, place.start), min(high, place.stop)
                if start >= stop:
                    continue
                with file.open("r+b") as opened:
                    opened.seek(offset + (start - place.start) * values.element_size())
                    opened.write(memory_of(values[start - low : stop - low]))
        return {}

    def finish(self) -> None:
        """The files are complete once every tensor is written."""

    @staticmethod
    def kept(value: Any) -> Any:
        """An object as it is read back."""
        return value


def _targets(file: Path, content: Content) -> dict[LeafPath, tuple[Place, int]]:
    """Each place with the byte of the file at which it begins."""
    offsets = _offsets(file, content)
    return {
        path: (place, offsets[_storage(place.memory)] + place.first * place.memory.element_size())
        for path, place in content.places.items()
        if place.start < place.stop
    }


def _offsets(file: Path, content: Content) -> dict[Any, int]:
    """Byte in the file of each storage. torch.save numbers storages in the order in which it meets them."""
    storages = dict.fromkeys(_storage(tensor) for tensor in _tensors(unflatten(content.leaves)))
    with file.open("rb") as opened:
        found = storages_in(opened, 0, file.stat().st_size, str(file))
    return {storage: found[str(number)][0] for number, storage in enumerate(storages)}


def _storage(tensor: torch.Tensor) -> Any:
    """Tells storages apart; those without bytes, of which each is in one tensor here, by that."""
    return tensor.untyped_storage().data_ptr() or ("empty", id(tensor))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in the order in which they are pickled."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, PickledShards):
        if tree.local is not None:
            yield tree.local
    elif isinstance(tree, dict | list | tuple):
        for below in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(below)
