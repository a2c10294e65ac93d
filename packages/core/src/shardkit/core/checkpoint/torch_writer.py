"""Files of torch.save, laid out before there are any values and filled in piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.archive import storages_in
from shardkit.core.checkpoint.leaves import LeafPath
from shardkit.core.checkpoint.memory import memory_of
from shardkit.core.checkpoint.stored import Checkpoint, Slab, StoredTensor

__all__ = ["Content", "Place", "TorchWriter"]


@dataclass(frozen=True)
class Place:
    """Where elements [start, stop) of a tensor of the checkpoint go: into `memory`, from its element `first` on."""

    start: int
    stop: int
    memory: torch.Tensor
    first: int = 0


@dataclass(frozen=True)
class Content:
    """What one file holds. Its tensors only have sizes: memory that is never touched is never there.

    Attributes:
        leaves: by path, what is pickled.
        places: by path of a tensor of the checkpoint, where the file's part of it goes.
        padding: memory, first and last element, and what they are filled with.
    """

    leaves: dict[LeafPath, Any] = field(default_factory=dict)
    places: dict[LeafPath, Place] = field(default_factory=dict)
    padding: list[tuple[torch.Tensor, int, int, float]] = field(default_factory=list)

    def add_whole(self, path: LeafPath, stored: StoredTensor) -> None:
        """Gives the file all of a tensor."""
        whole = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self.leaves[path] = whole
        self.places[path] = Place(0, stored.numel, whole)


class TorchWriter:
    """`checkpoint.pt` with everything, or the files of several ranks, whose parts `content` says.

    Attributes:
        file: the one that is laid out last.
    """

    def __init__(self, directory: Path, checkpoint: Checkpoint, names: Iterable[str] = ("checkpoint.pt",)) -> None:
        self._files = [directory / name for name in names]
        self.file = self._files[0]
        self._checkpoint = checkpoint
        self._targets: list[dict[LeafPath, tuple[Place, int]]] = []

    def content(self, number: int) -> Content:
        """What a file holds: the same at every call."""
        content = Content()
        for path, stored in self._checkpoint.tensors.items():
            content.add_whole(path, stored)
        content.leaves.update(self._checkpoint.objects)
        return content

    def memory_in(self, leaf: Any) -> torch.Tensor | None:
        """The tensor that a leaf is pickled with."""
        return leaf if isinstance(leaf, torch.Tensor) else None

    def begin(self, records: dict[str, Any]) -> None:
        """Lays the files out, unless they are there with records in them."""
        if not records:
            for number in reversed(range(len(self._files))):  # the first one last: with it all are there
                self._lay_out(self._files[number], self.content(number))
        self._targets = [self._found(file, self.content(number)) for number, file in enumerate(self._files)]

    def _lay_out(self, file: Path, content: Content) -> None:
        with torch.serialization.skip_data():
            torch.save(self._checkpoint.nested(content.leaves), file)
        offsets = self._offsets(file, content)
        with file.open("r+b") as opened:
            for memory, first, last, value in content.padding:
                opened.seek(offsets[_storage(memory)] + first * memory.element_size())
                opened.write(memory_of(torch.full((last - first,), value, dtype=memory.dtype)))

    def write(self, path: LeafPath, slabs: Iterator[Slab]) -> dict[str, Any]:
        """Writes one tensor into every file that has a part of it; returns its record."""
        here = [(file, *found[path]) for file, found in zip(self._files, self._targets, strict=True) if path in found]
        for low, high, values in slabs:
            for file, place, offset in here:
                start, stop = max(low, place.start), min(high, place.stop)
                if start < stop:
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

    def _found(self, file: Path, content: Content) -> dict[LeafPath, tuple[Place, int]]:
        """Each place with the byte of the file at which it begins."""
        offsets = self._offsets(file, content)
        return {
            path: (place, offsets[_storage(place.memory)] + place.first * place.memory.element_size())
            for path, place in content.places.items()
            if place.start < place.stop
        }

    def _offsets(self, file: Path, content: Content) -> dict[Any, int]:
        """Byte in the file of each storage. torch.save numbers storages in the order in which it meets them."""
        found = self._memory_below(self._checkpoint.nested(content.leaves))
        storages = dict.fromkeys(_storage(tensor) for tensor in found)
        with file.open("rb") as opened:
            places = storages_in(opened, 0, file.stat().st_size, str(file))
        return {storage: places[str(number)][0] for number, storage in enumerate(storages)}

    def _memory_below(self, tree: Any) -> Iterator[torch.Tensor]:
        """The tensors in the order in which they are pickled."""
        if isinstance(tree, dict | list | tuple):
            for below in tree.values() if isinstance(tree, dict) else tree:
                yield from self._memory_below(below)
        elif (memory := self.memory_in(tree)) is not None:
            yield memory


def _storage(tensor: torch.Tensor) -> Any:
    """Tells storages apart; those without bytes, of which each is in one tensor here, by that."""
    return tensor.untyped_storage().data_ptr() or ("empty", id(tensor))
