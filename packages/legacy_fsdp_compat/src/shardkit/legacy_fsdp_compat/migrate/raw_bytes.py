"""Ranges of bytes in files: inside the zip archives of torch.save, and as tensors."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardkit.legacy_fsdp_compat.migrate.stored import CheckpointError, Read

__all__ = ["bytes_of", "payloads", "read_range", "region_reader"]

_LOCAL_HEADER = 30


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


def region_reader(path: Path, offset: int, start: int, dtype: torch.dtype) -> Read:
    """Reads ranges of a tensor whose element number `start` lies at `offset` of a file."""
    return lambda low, high: read_range(path, offset + (low - start) * dtype.itemsize, high - low, dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-D CPU tensor."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
