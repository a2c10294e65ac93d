"""Ranges of bytes in files: inside the zip archives of torch.save, and as tensors. No values are unpickled."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardkit.legacy_fsdp_compat.migrate.stored import CheckpointError

__all__ = ["Region", "archived_tensor", "bytes_of", "payloads", "read_range"]

_LOCAL_HEADER = 30


@dataclass(frozen=True)
class Region:
    """A tensor in a file: where its first element lies, in bytes, and how the others follow, in elements."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Window(io.RawIOBase):
    """Part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._offset + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data


def payloads(path: Path, offset: int = 0, length: int | None = None) -> dict[str, tuple[int, int]]:
    """The storages in an archive of torch.save: key -> (offset in the file, bytes).

    Raises:
        CheckpointError: for anything that is no whole archive, or a compressed one.
    """
    length = path.stat().st_size - offset if length is None else length
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(_Window(file, offset, length))
            entries = archive.infolist()
        except zipfile.BadZipFile as error:
            raise CheckpointError(
                f"{path} holds no whole archive in bytes {offset} to {offset + length}: {error}"
            ) from error
        found = {}
        for entry in entries:
            parts = entry.filename.split("/")
            if len(parts) < 2 or parts[-2] != "data":
                continue
            if entry.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"{path}: '{entry.filename}' is compressed, which torch.save never does")
            file.seek(offset + entry.header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
            found[parts[-1]] = (offset + entry.header_offset + _LOCAL_HEADER + name + extra, entry.file_size)
    return found


_STORAGE_DTYPES = {
    "UntypedStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
"""What torch.save calls storages by dtype; other dtypes come in untyped ones."""


@dataclass(frozen=True)
class _StorageName:
    """Stands in for a storage: its key in the archive, and its bytes."""

    key: str
    nbytes: int


class _LayoutUnpickler(pickle.Unpickler):
    """Reads how a tensor lies in its storage, and makes nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        rebuild = {"_rebuild_tensor_v2": _layout_v2, "_rebuild_tensor_v3": _layout_v3}.get(name)
        if module == "torch._utils" and rebuild is not None:
            return rebuild
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not what a plain tensor is made of")

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, count = pid
        return _StorageName(key, count * dtype.itemsize), dtype


def _layout_v2(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> tuple[_StorageName, Region]:
    if len(rest) > 2 and rest[2]:
        raise pickle.UnpicklingError(f"a tensor with {rest[2]}")
    name, dtype = storage
    return name, Region(offset * dtype.itemsize, dtype, tuple(size), tuple(stride))


def _layout_v3(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, dtype: Any, *rest: Any
) -> tuple[_StorageName, Region]:
    return _layout_v2((storage[0], dtype), offset, size, stride, requires_grad, hooks, *rest)


def archived_tensor(path: Path, offset: int, length: int) -> Region:
    """Where the one tensor lies that an archive of torch.save in bytes [offset, offset + length) of a file holds.

    Raises:
        CheckpointError: for anything that is no whole archive of one plain tensor.
    """
    found = payloads(path, offset, length)
    where = f"bytes {offset} to {offset + length} of {path}"
    with path.open("rb") as file:
        archive = zipfile.ZipFile(_Window(file, offset, length))
        (pickled,) = [name for name in archive.namelist() if name.endswith("data.pkl")][:1] or [""]
        try:
            name, region = _LayoutUnpickler(io.BytesIO(archive.read(pickled))).load()
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where} hold no plain tensor: {error}") from error
    start, nbytes = found.get(name.key, (0, -1))
    reach = 1 + sum((size - 1) * stride for size, stride in zip(region.shape, region.strides, strict=True))
    needed = region.offset + reach * region.dtype.itemsize if 0 not in region.shape else 0
    if nbytes != name.nbytes or needed > nbytes or min(region.strides, default=0) < 0 or region.offset < 0:
        raise CheckpointError(
            f"{where} hold a storage of {nbytes} bytes; their tensor needs {max(needed, name.nbytes)}"
        )
    return Region(start + region.offset, region.dtype, region.shape, region.strides)


def read_range(path: Path, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements at a byte offset of a file.

    Raises:
        CheckpointError: if the file ends before.
    """
    if not count:
        return torch.empty(0, dtype=dtype)
    buffer = bytearray(count * dtype.itemsize)
    with path.open("rb") as file:
        file.seek(offset)
        seen = file.readinto(buffer)
    if seen != len(buffer):
        raise CheckpointError(f"{path} ends at byte {offset + seen}, expected at least {offset + len(buffer)}")
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-D CPU tensor."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
