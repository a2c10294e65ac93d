"""Writers of every format, offline and by one process: torch.distributed.checkpoint, torch.save, safetensors."""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.index import BLOCK_BYTES, Chunk, File, ObjectEntry, TensorEntry
from shardkit.core.checkpoint.leaves import At, LeafPath, encode_path, flatten, name_of, unflatten
from shardkit.core.checkpoint.safetensors_files import SafetensorsLayout
from shardkit.core.checkpoint.saving import chunk_after, data_file, write_index
from shardkit.core.checkpoint.sources import OBJECTS_NOTE, PATHS_NOTE
from shardkit.core.checkpoint.stored import Checkpoint, Slab, StoredTensor, memory_of
from shardkit.core.checkpoint.torch_files import archive_of, storages_in
from shardkit.core.checkpoint.verified_file import BlockSums


class Writer(ABC):
    """One format. `begin` lays out its files, or resumes an earlier attempt."""

    file: Path  # exists once all files are laid out

    @abstractmethod
    def begin(self, records: dict[str, Any]) -> None:
        """Starts; `records` has the results of `write` for tensors that are already written."""

    @abstractmethod
    def write(self, path: LeafPath, slabs: Iterator[Slab]) -> dict[str, Any]:
        """Writes one tensor; returns the JSON record needed to resume after it."""

    def finish(self) -> None:  # noqa: B027 (most formats are complete then)
        """Completes the files after every tensor is written."""

    def kept(self, value: Any) -> Any:
        """An object in the form that the format returns on reading."""
        return value


class DataFile:
    """A file that grows at its end; with `sealed`, it has the checksums of its blocks."""

    def __init__(self, path: Path, end: int, *, sealed: bool) -> None:
        self.path, self.end = path, end
        self._sums = BlockSums() if sealed else None
        with path.open("ab") as file:
            file.truncate(end)
        if self._sums is not None and end:
            with path.open("rb") as file:
                while data := file.read(BLOCK_BYTES):
                    self._sums.add(data)

    def append(self, data: bytes | memoryview) -> None:
        if self._sums is not None:
            self._sums.add(data)
        with self.path.open("ab") as file:  # not kept open: a failed attempt leaves no buffered data
            file.write(data)
        self.end += len(data)

    def finish(self) -> File:
        """Ends the file."""
        return File(self.path.name, self.end, None if self._sums is None else self._sums.finish())


class DcpWriter(Writer):
    """Tensors cut by rows into the files of `ranks`, as `fully_shard` cuts them, and the metadata at the end.

    Data written before an interruption is kept: the record of a tensor resumes it. Writes the checkpoint's tensors and
    its `about`; `objects` are bytes of torch.save. `sealed` adds our manifest, with checksums of every file.
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

    def begin(self, records: dict[str, Any]) -> None:
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
    """The chunk of rows [first, stop); all bytes before its values are written."""
    sizes = (stop - first, *stored.shape[1:]) if stored.shape else ()
    offsets = (first, *[0] * (len(stored.shape) - 1)) if stored.shape else ()
    chunk = chunk_after(file.end, file.path.name, stored.dtype, offsets, sizes)
    file.append(bytes(chunk.offset - file.end) + archive_of(stored.dtype, sizes).head)
    return chunk


def objects_for_stock(checkpoint: Checkpoint) -> dict[LeafPath, bytes]:
    """The objects of a checkpoint in the form of torch.distributed.checkpoint. Raises CheckpointError for tensors that
    it cannot hold there, and for two values of one name.
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
    saved: dict[LeafPath, bytes] = {}
    for path, value in (*leaves.values.items(), *whole.items()):
        if value is not stand_in:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            saved[path] = buffer.getvalue()
    return saved


def _check_keys(checkpoint: Checkpoint) -> None:
    """Checks keys: torch.distributed.checkpoint turns all of them into strings, and keeps tuples of tensors whole."""
    for path in checkpoint.tensors:
        odd = [part for part in path if not isinstance(part, str) and getattr(part, "of", None) != "list"]
        if odd:
            what = "in a tuple" if isinstance(odd[0], At) else f"under the key {odd[0]!r}, which is not a string"
            raise CheckpointError(
                f"'{name_of(path)}' is a tensor {what}: a torch.distributed.checkpoint cannot hold it. Convert with "
                "--to full; for optimizer state save names, by FSDP.optim_state_dict"
            )


def _whole_objects(objects: Mapping[LeafPath, Any]) -> dict[LeafPath, Any]:
    """Objects that torch would change by flattening them (keys that are not strings, empty dicts), kept whole."""
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
    """The target of elements [start, stop) of a checkpoint's tensor: `memory`, from its element `first` on."""

    start: int
    stop: int
    memory: torch.Tensor
    first: int = 0


@dataclass(frozen=True)
class Content:
    """The contents of one file. Its tensors only have sizes: untouched memory is never allocated."""

    leaves: dict[LeafPath, Any] = field(default_factory=dict)  # the pickled values, by path
    # by path of a tensor of the checkpoint, the target of its part in this file
    places: dict[LeafPath, Place] = field(default_factory=dict)
    # memory, first and last element, and the fill value
    padding: list[tuple[torch.Tensor, int, int, float]] = field(default_factory=list)

    def add_whole(self, path: LeafPath, stored: StoredTensor) -> None:
        """Adds a whole tensor to the file."""
        whole = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self.leaves[path] = whole
        self.places[path] = Place(0, stored.numel, whole)


class _PlacedWriter(Writer):
    """Lays its files out before there are values; each tensor is then written at its place."""

    def __init__(self) -> None:
        self._places: dict[LeafPath, list[tuple[Path, int, int, int]]] = {}
        """By tensor: file, first and last element there, and the byte at which the first one goes."""

    def write(self, path: LeafPath, slabs: Iterator[Slab]) -> dict[str, Any]:
        for low, high, values in slabs:
            for file, first, last, offset in self._places.get(path, ()):
                start, stop = max(low, first), min(high, last)
                if start < stop:
                    with file.open("r+b") as opened:
                        opened.seek(offset + (start - first) * values.element_size())
                        opened.write(memory_of(values[start - low : stop - low]))
        return {}


class TorchWriter(_PlacedWriter):
    """`checkpoint.pt` with everything, or the files of several ranks, whose parts `content` determines."""

    def __init__(self, directory: Path, checkpoint: Checkpoint, names: Iterable[str] = ("checkpoint.pt",)) -> None:
        super().__init__()
        self._files = [directory / name for name in names]
        self.file = self._files[0]
        self._checkpoint = checkpoint

    def content(self, number: int) -> Content:
        """The contents of a file: the same at every call."""
        content = Content()
        for path, stored in self._checkpoint.tensors.items():
            content.add_whole(path, stored)
        content.leaves.update(self._checkpoint.objects)
        return content

    def memory_in(self, leaf: Any) -> torch.Tensor | None:
        """The tensor that stands for a leaf in the pickle."""
        return leaf if isinstance(leaf, torch.Tensor) else None

    def begin(self, records: dict[str, Any]) -> None:
        for number in reversed(range(len(self._files))):  # the first one last: when it exists, all do
            file, content = self._files[number], self.content(number)
            tree = self._checkpoint.nested(content.leaves)
            if not records:
                with torch.serialization.skip_data():
                    torch.save(tree, file)
            offsets = self._offsets(file, tree)
            for path, place in content.places.items():
                at = offsets[_storage(place.memory)] + place.first * place.memory.element_size()
                if place.start < place.stop:
                    self._places.setdefault(path, []).append((file, place.start, place.stop, at))
            with file.open("r+b") as opened:
                for memory, first, last, value in content.padding if not records else ():
                    opened.seek(offsets[_storage(memory)] + first * memory.element_size())
                    opened.write(memory_of(torch.full((last - first,), value, dtype=memory.dtype)))

    def _offsets(self, file: Path, tree: Any) -> dict[Any, int]:
        """Offset of each storage in the file. torch.save numbers storages in the order in which it meets them."""
        storages = dict.fromkeys(_storage(tensor) for tensor in self._memory_below(tree))
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
    """A key that identifies a storage; an empty storage, which only one tensor here uses, by its tensor."""
    return tensor.untyped_storage().data_ptr() or ("empty", id(tensor))


class SafetensorsWriter(_PlacedWriter):
    """The files of a `SafetensorsLayout`.

    Paths and objects, if any, are JSON in the metadata of the first file. Raises CheckpointError for dtypes that
    safetensors lacks, and objects that JSON cannot express.
    """

    def __init__(self, directory: Path, checkpoint: Checkpoint, file_bytes: int | None = None) -> None:
        super().__init__()
        stored = {name_of(path): one for path, one in checkpoint.tensors.items()}
        looks = {name: (one.dtype, one.shape) for name, one in stored.items()}
        self._directory = directory
        self._layout = SafetensorsLayout.of(looks, file_bytes, _notes(checkpoint))
        for path, one in checkpoint.tensors.items():
            file, offset = self._layout.places[name_of(path)]
            self._places[path] = [(directory / file, 0, one.numel, offset)]
        self.file = directory / next(iter(self._layout.heads))

    def begin(self, records: dict[str, Any]) -> None:
        if not records:
            self._layout.create(self._directory)

    def finish(self) -> None:
        self._layout.write_index(self._directory)

    def kept(self, value: Any) -> Any:
        return _as_json(value)


def _notes(checkpoint: Checkpoint) -> dict[str, str]:
    notes: dict[str, str] = {}
    for path in (*checkpoint.tensors, *checkpoint.objects):
        odd = [part for part in path if type(part) not in (str, int, At)]
        if odd:
            raise CheckpointError(f"'{name_of(path)}' is under the key {odd[0]!r}; keys must be str or int")
    if any(len(path) > 1 or path[0] != name_of(path) for path in checkpoint.tensors):
        notes[PATHS_NOTE] = json.dumps({name_of(path): encode_path(path) for path in checkpoint.tensors})
    for path, value in checkpoint.objects.items():
        try:
            kept = repr(json.loads(json.dumps(value))) == repr(_as_json(value))
        except (TypeError, ValueError):
            kept = False
        if not kept:
            raise CheckpointError(
                f"'{name_of(path)}' is {value!r:.60}, and safetensors can only store JSON values; convert to dcp "
                "or full"
            )
    if checkpoint.objects:
        notes[OBJECTS_NOTE] = json.dumps([[encode_path(path), value] for path, value in checkpoint.objects.items()])
    return notes


def _as_json(value: Any) -> Any:
    """The value with lists for tuples, which JSON lacks."""
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return {key: _as_json(one) for key, one in value.items()} if isinstance(value, dict) else value
