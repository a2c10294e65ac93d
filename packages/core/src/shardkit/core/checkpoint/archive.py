"""How torch.save lays out one tensor: some bytes, the values, some bytes. Only the values depend on the values.

So a data file of torch.distributed.checkpoint, a row of such archives, can be laid out before there are any values, and
every rank knows the length of every other rank's archives.
"""

from __future__ import annotations

import functools
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from shardkit.core.checkpoint.errors import DamagedCheckpointError

__all__ = ["ALIGNMENT", "Archive", "archive_of", "values_in"]

ALIGNMENT = 64
"""Values start at multiples of this in a data file, so that they can be copied to and from its image as tensors."""

_LOCAL_HEADER = 30


@dataclass(frozen=True)
class Archive:
    """The archive of one tensor.

    ::

    | head | values (nbytes) | tail |
    """

    head: bytes
    tail: bytes
    nbytes: int

    @property
    def length(self) -> int:
        """Bytes of the whole archive."""
        return len(self.head) + self.nbytes + len(self.tail)

    def place(self, end: int) -> int:
        """Where the archive goes in a file that has been filled up to `end`: its values start aligned."""
        values = end + len(self.head)
        return -(-values // ALIGNMENT) * ALIGNMENT - len(self.head)


@functools.lru_cache(maxsize=4096)
def archive_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Archive:
    """The archive of a contiguous CPU tensor, as torch.save writes it with its checksums switched off.

    The archive's own CRC-32 fields stay zero, as `torch.serialization.set_crc32_options(False)` leaves them: torch does
    not read them, and the manifest has better ones.
    """
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    with tempfile.TemporaryDirectory(prefix="shardkit-") as directory:
        path = Path(directory) / "archive"
        with torch.serialization.skip_data():  # the space of the values is left out: a hole in a sparse file
            torch.save(tensor, path)
        with path.open("rb") as file:
            start, nbytes = values_in(file, 0, path.stat().st_size, str(path))
            file.seek(0)
            head = file.read(start)
            file.seek(start + nbytes)
            tail = file.read()
    assert nbytes == tensor.numel() * dtype.itemsize, f"{nbytes} bytes for {tensor.numel()} elements of {dtype}"
    return Archive(head, tail, nbytes)


class _Window:
    """A part of a file as a file of its own, for zipfile."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size < 0 else min(size, left)
        self._file.seek(self._offset + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data


def values_in(file: IO[bytes], offset: int, length: int, name: str) -> tuple[int, int]:
    """Where the values of the one tensor lie that bytes [offset, offset + length) of a file hold: (offset, bytes).

    Raises:
        DamagedCheckpointError: if these bytes are no such archive, or one of several tensors.
    """
    where = f"{name}: bytes {offset} to {offset + length}"
    try:
        window: IO[bytes] = _Window(file, offset, length)  # type: ignore[assignment]  # all that zipfile asks for
        entries = [one for one in zipfile.ZipFile(window).infolist() if one.filename.split("/")[-2:-1] == ["data"]]
    except (zipfile.BadZipFile, ValueError, NotImplementedError, UnicodeDecodeError, struct.error) as error:
        raise DamagedCheckpointError(f"{where} are no archive of torch.save: {error}") from error
    if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED:
        raise DamagedCheckpointError(f"{where} hold {len(entries)} storages or compressed ones, expected a plain one")
    file.seek(offset + entries[0].header_offset)
    header = file.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise DamagedCheckpointError(f"{where} hold no storage where their directory says")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    start = offset + entries[0].header_offset + _LOCAL_HEADER + name_length + extra_length
    if start < offset or start + entries[0].file_size > offset + length:
        raise DamagedCheckpointError(f"{where}: the storage inside claims {entries[0].file_size} bytes")
    return start, entries[0].file_size
