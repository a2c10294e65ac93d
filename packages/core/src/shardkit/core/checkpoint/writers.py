"""Writes checkpoints offline, by one process: those of torch.distributed.checkpoint, and files of torch.save."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.commit import data_file, write_index
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.index import BLOCK_BYTES, Chunk, File, ObjectEntry, TensorEntry
from shardkit.core.checkpoint.leaves import At, LeafPath, flatten, name_of, unflatten
from shardkit.core.checkpoint.stored import Checkpoint, Slab, StoredTensor, memory_of
from shardkit.core.checkpoint.torch_files import archive_of, storages_in
from shardkit.core.checkpoint.verified_file import DIGEST_BYTES

__all__ = ["Content", "DataFile", "DcpWriter", "Place", "TorchWriter", "objects_for_stock"]


class DataFile:
    """Grows at its end; with `sealed`, knows the checksums of its blocks."""

    def __init__(self, path: Path, end: int, *, sealed: bool) -> None:
        self.path, self._sealed = path, sealed
        self._hash, self._in_block = hashlib.sha256(), 0
        self._blocks: list[str] = []
        self.end = end
        with path.open("ab") as file:
            file.truncate(end)
        if sealed and end:
            with path.open("rb") as file:
                while data := file.read(BLOCK_BYTES):
                    self._note(memoryview(data))

    def append(self, data: bytes | memoryview) -> None:
        """Writes at the end."""
        view = memoryview(data)
        if self._sealed:
            self._note(view)
        with self.path.open("ab") as file:  # not kept open: an attempt that fails leaves nothing to be flushed later
            file.write(view)
        self.end += len(view)

    def _note(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            part = view[done : done + BLOCK_BYTES - self._in_block]
            self._hash.update(part)
            self._in_block += len(part)
            done += len(part)
            if self._in_block == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(self._hash.digest()[:DIGEST_BYTES].hex())
        self._hash, self._in_block = hashlib.sha256(), 0

    def finish(self) -> File:
        """Nothing follows."""
        if self._in_block:
            self._end_block()
        return File(self.path.name, self.end, tuple(self._blocks) if self._sealed else None)


class DcpWriter:
    """Tensors cut by rows into the files of `ranks`, as `fully_shard` cuts them, and the metadata at the end.

    What was written before an interruption stays: a tensor is taken up again by its record.

    Args:
        directory: gets the files.
        checkpoint: its tensors, and its step, world size, info, empty mappings and order.
        objects: bytes of torch.save, by path.
        ranks: number of data files.
        sealed: also write our manifest, with checksums of every file.
    """

    def __init__(
        self,
        directory: Path,
        checkpoint: Checkpoint,
        objects: Mapping[LeafPath, bytes],
        *,
        ranks: int = 1,
        sealed: bool = False,
    ) -> None:
        self._directory, self._checkpoint, self._objects = directory, checkpoint, objects
        self._ranks, self._sealed = ranks, sealed
        self._files: list[DataFile] = []
        self._chunks: dict[str, list[Chunk]] = {}
        self.file = directory / data_file(0)

    @staticmethod
    def kept(value: Any) -> Any:
        """An object as it is read back."""
        return value

    def begin(self, records: dict[str, Any]) -> None:
        """Takes up what is recorded as written; what lies behind it is dropped."""
        ends = [0] * self._ranks
        for name, record in records.items():
            self._chunks[name] = [
                Chunk(file, offset, length, tuple(offsets), tuple(sizes), values)
                for file, offset, length, offsets, sizes, values in record["chunks"]
            ]
            ends = [max(pair) for pair in zip(ends, record["ends"], strict=True)]
        self._files = [
            DataFile(self._directory / data_file(rank), end, sealed=self._sealed) for rank, end in enumerate(ends)
        ]

    def write(self, path: LeafPath, slabs: Iterator[Slab]) -> dict[str, Any]:
        """Writes one tensor; returns its record."""
        stored = self._checkpoint.tensors[path]
        rows = -(-stored.rows // self._ranks)
        chunks: list[Chunk] = []
        for low, high, values in slabs:
            at = low
            while at < high:
                rank = at // stored.row // rows
                file, first, stop = self._files[rank], rank * rows, min((rank + 1) * rows, stored.rows)
                edge = min(high, stop * stored.row)
                if at == first * stored.row:
                    chunks.append(_begun(file, stored, first, stop))
                file.append(memory_of(values[at - low : edge - low]))
                if edge == stop * stored.row:
                    file.append(archive_of(stored.dtype, chunks[-1].sizes).tail)
                at = edge
        self._chunks[name_of(path)] = chunks
        described = [(one.file, one.offset, one.length, one.offsets, one.sizes, one.values) for one in chunks]
        return {"ends": [file.end for file in self._files], "chunks": described}

    def finish(self) -> None:
        """Writes the objects, the metadata and, if it is to be sealed, the manifest."""
        objects = {}
        for path, data in self._objects.items():
            objects[name_of(path)] = ObjectEntry(path, data_file(0), self._files[0].end, len(data))
            self._files[0].append(data)
        tensors = {
            name: TensorEntry(path, one.dtype, one.shape, tuple(self._chunks[name]))
            for path, one in self._checkpoint.tensors.items()
            for name in [name_of(path)]
        }
        files = [file.finish() for file in self._files]
        index = replace(
            self._checkpoint.about, tensors=tensors, objects=objects, files={one.name: one for one in files}
        )
        write_index(self._directory, index, sealed=self._sealed)


def _begun(file: DataFile, stored: StoredTensor, first: int, stop: int) -> Chunk:
    """Rows [first, stop), of which everything before the values is written."""
    sizes = (stop - first, *stored.shape[1:]) if stored.shape else ()
    offsets = (first, *[0] * (len(stored.shape) - 1)) if stored.shape else ()
    archive = archive_of(stored.dtype, sizes)
    start = archive.place(file.end)
    file.append(bytes(start - file.end) + archive.head)
    return Chunk(file.path.name, start, archive.length, offsets, sizes, start + len(archive.head))


def objects_for_stock(checkpoint: Checkpoint) -> dict[LeafPath, bytes]:
    """The objects of a checkpoint, taken apart as torch.distributed.checkpoint takes them apart.

    Raises:
        CheckpointError: for tensors that it cannot hold where they are, and for two values of one name.
    """
    _check_keys(checkpoint)
    whole = _whole_objects(checkpoint.objects)
    stand_in = torch.empty(0, device="meta")
    split = {
        path: value
        for path, value in checkpoint.objects.items()
        if not any(path[: len(root)] == root for root in whole)
    }
    try:
        leaves = flatten(unflatten({**dict.fromkeys(checkpoint.tensors, stand_in), **split}))
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return {path: _saved(value) for path, value in (*leaves.values.items(), *whole.items()) if value is not stand_in}


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _check_keys(checkpoint: Checkpoint) -> None:
    """torch.distributed.checkpoint makes strings of all keys, and tuples of tensors it does not take apart."""
    for path in checkpoint.tensors:
        odd = [part for part in path if not isinstance(part, str) and getattr(part, "of", None) != "list"]
        if odd:
            what = "in a tuple" if isinstance(odd[0], At) else f"below the key {odd[0]!r}, which is no string"
            raise CheckpointError(
                f"'{name_of(path)}' is a tensor {what}: a torch.distributed.checkpoint cannot hold it. Convert with "
                "--to full; for optimizer state save names, by FSDP.optim_state_dict"
            )


def _whole_objects(objects: Mapping[LeafPath, Any]) -> dict[LeafPath, Any]:
    """Objects that torch would change by taking them apart (keys that are no strings, empty dicts), as they are."""
    found: dict[LeafPath, Any] = {}
    below: dict[LeafPath, dict[LeafPath, Any]] = {}
    for path, value in objects.items():
        odd = next((number for number, part in enumerate(path) if not isinstance(part, str | At)), None)
        if odd is not None:
            below.setdefault(path[:odd], {})[path[odd:]] = value
        elif not _survives(value):
            found[path] = value
    return found | {path: unflatten(leaves) for path, leaves in below.items()}


def _survives(value: Any) -> bool:
    if isinstance(value, Mapping):
        keys = all(isinstance(key, str) for key in value)
        return type(value) is dict and bool(value) and keys and all(map(_survives, value.values()))
    return all(map(_survives, value)) if isinstance(value, list) else True


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
