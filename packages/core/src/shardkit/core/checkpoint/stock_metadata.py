"""Stock's `.metadata`, the index of torch.distributed.checkpoint: written fast, and read safely.

It is written without constructing its objects, of which there are three for each chunk of each tensor and rank. The
opcodes are those that pickle writes for stock's classes. pickle writes the parts that occur once for each tensor. Parts
of each chunk are assembled from bytes, in a fifth of the time of pickling objects.

Our own checkpoints are never read through it. It is read for directories that stock wrote, by an unpickler that
constructs only the metadata's classes. The opcodes are checked first: a pickle can request any amount of memory.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError, damage_of
from shardkit.core.checkpoint.index import DTYPES, MANIFEST, SAVE_ID, Chunk, File, Index, ObjectEntry, TensorEntry
from shardkit.core.checkpoint.leaves import At, LeafPath, LeftOut, name_of, stock_path
from shardkit.core.checkpoint.location import Location, sizes_of
from shardkit.core.checkpoint.pickled import check_pickle
from shardkit.core.checkpoint.verified_file import read_small
from shardkit.core.torch_compat import CheckpointStorageInfo

_CLASSES = (torch.Size, ChunkStorageMetadata, TensorStorageMetadata, MetadataIndex, CheckpointStorageInfo, Metadata)
_NAMES = ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length", "properties", "size", "chunks")
_TENSOR_NAME = len(_CLASSES) + len(_NAMES)
_GET: dict[Any, bytes] = {key: b"h" + bytes([number]) for number, key in enumerate((*_CLASSES, *_NAMES))}
"""Opcodes that push a class or name from the memo. The memo's next entry is the name of the last tensor."""
_NEW: dict[type, bytes] = {kind: _GET[kind] + b")\x81}(" for kind in _CLASSES}
_STORAGE, _OFFSET, _LENGTH = _NEW[CheckpointStorageInfo] + _GET["relative_path"], _GET["offset"], _GET["length"]


def stock_metadata(index: Index, save_id: str | None = SAVE_ID) -> bytes:
    """The metadata that torch.distributed.checkpoint needs to load the contents of an index."""
    state = {
        **{name: _pushed(value) for name, value in vars(Metadata({})).items()},
        "state_dict_metadata": b"".join([b"}(", *_described(index), b"u"]),
        "planner_data": _pushed({name: stock_path(path) for name, path in index.paths.items()}),
        "storage_data": b"".join([b"}(", *_stored(index), b"u"]),
        "storage_meta": _pushed(StorageMeta(save_id=save_id)),
    }
    remembered = [_remembered(key, number) for number, key in enumerate(_GET)]
    items = [_pushed(name) + value for name, value in state.items()]
    return b"".join([b"\x80\x02", *remembered, _object(Metadata, *items), b"."])


def _described(index: Index) -> Iterator[bytes]:
    """Names, and the description of each tensor or object."""
    head, between = _NEW[ChunkStorageMetadata] + _GET["offsets"], _GET["sizes"]
    for name, entry in index.tensors.items():
        chunks = [head + _size(c.offsets) + between + _size(c.sizes) + b"ub" for c in entry.chunks]
        properties = _GET["properties"] + _pushed(TensorProperties(dtype=entry.dtype))
        size = _GET["size"] + _size(entry.shape)
        yield _pushed(name)
        yield _object(TensorStorageMetadata, properties, size, _GET["chunks"], b"](", *chunks, b"e")
    for name in index.objects:
        yield _pushed(name) + _pushed(BytesStorageMetadata())


def _stored(index: Index) -> Iterator[bytes]:
    """The location of each chunk and object: keys and values."""
    head = _NEW[MetadataIndex] + _GET["fqn"] + b"h" + bytes([_TENSOR_NAME]) + _GET["offset"]
    between = _GET["index"]
    for name, entry in index.tensors.items():
        yield _remembered(name, _TENSOR_NAME)  # this pushes nothing, so it may stand between items
        for number, chunk in enumerate(entry.chunks):
            yield head + _size(chunk.offsets) + between + _number(number) + b"ub" + _place(chunk)
    for name, one in index.objects.items():
        yield _pushed(MetadataIndex(name)) + _place(one)


def _place(one: Chunk | ObjectEntry) -> bytes:
    file, offset, length = _text(one.file), _number(one.offset), _number(one.length)
    return b"".join((_STORAGE, file, _OFFSET, offset, _LENGTH, length, b"ub"))


def _object(kind: type, *items: bytes) -> bytes:
    """An object of a class, with a dict of these keys and values as its state."""
    return b"".join((_NEW[kind], *items, b"ub"))


def _remembered(value: Any, number: int) -> bytes:
    """Stores a value in the memo and removes it from the stack."""
    return _pushed(value) + b"q" + bytes([number]) + b"0"


def _pushed(value: Any) -> bytes:
    """The opcodes that push any value, without a memo of their own."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]


@functools.lru_cache(maxsize=65536)
def _text(value: str) -> bytes:
    return _pushed(value)


def _number(value: int) -> bytes:
    if value < 256:
        return b"K" + value.to_bytes(1, "little")
    if value < 2**31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


@functools.lru_cache(maxsize=65536)
def _size(sizes: tuple[int, ...]) -> bytes:
    """A torch.Size."""
    numbers = b"".join(map(_number, sizes))
    values = numbers + (b")", b"\x85", b"\x86", b"\x87")[len(sizes)] if len(sizes) < 4 else b"(" + numbers + b"t"
    return _GET[torch.Size] + values + b"\x85R"


METADATA = ".metadata"

_OURS = "torch.distributed.checkpoint.metadata"
_OF_TENSORS = {"BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata"}
_ALLOWED = {
    _OURS: {*_OF_TENSORS, "Metadata", "MetadataIndex", "StorageMeta"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "device"},
    "collections": {"OrderedDict"},
    "builtins": {"set"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"PosixPath"},  # as Python 3.13 writes it
}
_UNUSED = {(_OURS, "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout")}


class _MetadataUnpickler(pickle.Unpickler):
    """Uses new classes for each file, because a pickle may set attributes of the classes that it names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if name == "getattr" and module in ("builtins", "__builtin__"):  # Python 3.11.2 writes enumerations by name
            return _unused_member
        if (module, name) in _UNUSED:
            return _Unused
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in the metadata of a checkpoint")
        if (module, name) not in self._made:
            kind = super().find_class(module, name)
            kind = _Properties if name == "TensorProperties" else kind
            builtin = kind.__module__ in ("builtins", "torch", "collections")  # these allow no attributes to be set
            self._made[module, name] = kind if builtin else type(name, (kind,), {})
        return self._made[module, name]


class _Properties:
    """Stands in for TensorProperties, of which only the dtype is used: (dtype, layout, ...)."""

    dtype: Any = None

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


class _Unused:
    """Stands in for values that are not needed for reading, such as a layout."""

    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        pass


def _unused_member(kind: object, name: object) -> _Unused:
    if kind is not _Unused:
        raise pickle.UnpicklingError(
            f"an attribute {name!r} of {kind!r} is not allowed in the metadata of a checkpoint"
        )
    return _Unused()


def unpickle_metadata(data: bytes) -> Any:
    """The contents of a `.metadata` file: made of metadata's own classes, and nothing else is executed. Raises
    pickle.UnpicklingError for anything else in it. Damaged pickles may raise any error.
    """
    check_pickle(data)
    return _MetadataUnpickler(data).load()


def read_stock(directory: Location, left_out: LeftOut) -> Index:
    """The index of a directory that torch.distributed.checkpoint has written; there are no checksums in it.

    Values in `left_out` need not exist. Raises DamagedCheckpointError if the metadata cannot be read or does not match
    the files, or if it belongs to a checkpoint of ours that has lost its manifest; CheckpointError if files are
    compressed or otherwise transformed.
    """
    data, path = read_small(directory, METADATA), directory / METADATA
    with damage_of(str(path), f"({len(data)} bytes) cannot be read", passing=()):
        metadata = unpickle_metadata(data)
    if not isinstance(metadata, Metadata):
        raise DamagedCheckpointError(f"{path} holds a {type(metadata).__name__}, expected Metadata")
    if getattr(getattr(metadata, "storage_meta", None), "save_id", None) == SAVE_ID:
        raise DamagedCheckpointError(
            f"{directory / MANIFEST} is missing, so this checkpoint cannot be verified; "
            "torch.distributed.checkpoint can still load it"
        )
    with damage_of(str(path), "is not put together as metadata"):
        return _index(directory, metadata, left_out)


def _index(directory: Location, metadata: Metadata, left_out: LeftOut) -> Index:
    if odd := [name for name in metadata.state_dict_metadata if not isinstance(name, str)]:
        raise DamagedCheckpointError(f"{odd[0]!r} where a name should be")
    paths = {name: _leaf_path(name, metadata.planner_data) for name in metadata.state_dict_metadata}
    paths = {name: path for name, path in paths.items() if not left_out.has(path)}
    infos: dict[str, dict[Any, Any]] = {}
    for where, info in (metadata.storage_data or {}).items():
        if where.fqn not in paths:
            continue
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{where.fqn}: is transformed by {info.transform_descriptors}, which is not supported; "
                "save it without a transform"
            )
        infos.setdefault(str(where.fqn), {})[None if where.offset is None else tuple(where.offset)] = info
    names = {str(info.relative_path) for found in infos.values() for info in found.values()}
    files = {}
    for name, nbytes in sizes_of(directory, [File(name, 0, None).name for name in names]):  # none outside of it
        path = directory / name
        if nbytes is None or (isinstance(path, Path) and (path.is_symlink() or not path.is_file())):
            raise DamagedCheckpointError(f"{path} does not exist, or is not a file")
        files[name] = File(name, nbytes, None)
    tensors, objects = {}, {}
    for name, path_of in paths.items():
        described = metadata.state_dict_metadata[name]
        found = infos.get(name, {})
        if isinstance(described, TensorStorageMetadata):
            tensors[name] = _tensor(name, path_of, described, found)
        elif found:
            info = next(iter(found.values()))
            objects[name] = ObjectEntry(path_of, str(info.relative_path), int(info.offset), int(info.length))
        else:
            raise DamagedCheckpointError(f"{name}: the metadata lists it, and no file that holds it")
    return Index(tensors, objects, files)


def _leaf_path(name: str, paths: Any) -> LeafPath:
    """The path that stock's planner stored for a name; the name itself if there is none, or a different one."""
    known = (paths or {}).get(name, (name,)) if isinstance(paths, dict | None) else (name,)
    path = tuple(At(part) if type(part) is int else str(part) for part in known)
    return path if name_of(path) == name else (name,)


def _tensor(name: str, path: LeafPath, described: TensorStorageMetadata, infos: dict[Any, Any]) -> TensorEntry:
    chunks = []
    for chunk in described.chunks:
        offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
        if 0 in sizes:
            continue
        info = infos.get(offsets)
        if info is None:
            raise DamagedCheckpointError(f"{name}: the metadata lists a chunk at {offsets}, and no file that holds it")
        chunks.append(Chunk(str(info.relative_path), int(info.offset), int(info.length), offsets, sizes, None))
    dtype = described.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpointError(f"{name}: dtype {dtype!r}")
    if dtype not in DTYPES.values():
        raise CheckpointError(f"{name} is of {dtype}, which cannot be read; leave it out")
    return TensorEntry(path, dtype, tuple(map(int, described.size)), tuple(chunks))
