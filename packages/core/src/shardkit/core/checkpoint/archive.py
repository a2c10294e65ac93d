"""How torch.save lays out one tensor: some bytes, the values, some bytes. Only the values depend on the values.

So a data file of torch.distributed.checkpoint, a row of such archives, can be laid out before there are any values, and
every rank knows the length of every other rank's archives.
"""

from __future__ import annotations

import functools
import io
import struct
import zipfile
from dataclasses import dataclass
from typing import IO, Any, cast

import torch

from shardkit.core.checkpoint.errors import DamagedCheckpointError

__all__ = ["ALIGNMENT", "Archive", "Window", "archive_of", "storages_in", "values_in"]

ALIGNMENT = 64
"""Values start at multiples of this in a data file, so that they can be copied to and from its image as tensors."""

_LOCAL_HEADER = 30
_NO_ARCHIVE = (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, EOFError, OSError)
"""What zipfile raises for bytes that are none, or damaged."""


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

    @property
    def description(self) -> bytes:
        """The pickle in the head: what torch.load makes of the values."""
        return self.head[self.head.index(b"\x80\x02") : self.head.index(b"PK\x07\x08")]

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
    tensor = torch.empty(shape, dtype=dtype, device="cpu")  # its memory is never touched
    written = _Written()
    with torch.serialization.skip_data():
        torch.save(tensor, cast(IO[bytes], written))
    nbytes = tensor.numel() * dtype.itemsize
    assert written.skipped == nbytes, f"{written.skipped} bytes for {tensor.numel()} elements of {dtype}"
    return Archive(bytes(written.head), bytes(written.tail), nbytes)


class _Written(io.RawIOBase):
    """What torch.save writes before and after the space that it leaves for values, over which it seeks."""

    def __init__(self) -> None:
        self.head, self.tail, self.skipped = bytearray(), bytearray(), 0
        self._before = True

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        (self.head if self._before else self.tail).extend(data)
        return len(data)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return len(self.head) + self.skipped + len(self.tail)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_CUR and self._before, "torch.save leaves out the values of one storage"
        self.skipped, self._before = offset, False
        return self.tell()


class Window:
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
    found = storages_in(file, offset, length, name)
    if len(found) != 1:
        raise DamagedCheckpointError(
            f"{name}: bytes {offset} to {offset + length} hold {len(found)} storages, expected one"
        )
    return next(iter(found.values()))


def storages_in(file: IO[bytes], offset: int, length: int, name: str) -> dict[str, tuple[int, int]]:
    """Where the values of each storage in an archive of torch.save lie: key -> (offset, bytes); raises the same."""
    where = f"{name}: bytes {offset} to {offset + length}"
    try:
        window: IO[bytes] = Window(file, offset, length)  # type: ignore[assignment]  # all that zipfile asks for
        entries = [one for one in zipfile.ZipFile(window).infolist() if one.filename.split("/")[-2:-1] == ["data"]]
    except _NO_ARCHIVE as error:
        raise DamagedCheckpointError(f"{where} are no archive of torch.save: {error}") from error
    return {one.filename.split("/")[-1]: _place(file, offset, length, one, where) for one in entries}


def _place(file: IO[bytes], offset: int, length: int, entry: zipfile.ZipInfo, where: str) -> tuple[int, int]:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise DamagedCheckpointError(f"{where} hold a compressed storage, which torch.save never writes")
    # zipfile corrects offsets by what it takes for bytes before the archive: damaged ones become negative.
    header = b""
    if 0 <= entry.header_offset <= length - _LOCAL_HEADER:
        file.seek(offset + entry.header_offset)
        header = file.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise DamagedCheckpointError(f"{where} hold no storage where their directory says")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    start = offset + entry.header_offset + _LOCAL_HEADER + name_length + extra_length
    if start < offset or start + entry.file_size > offset + length:
        raise DamagedCheckpointError(f"{where}: the storage inside claims {entry.file_size} bytes")
    return start, entry.file_size
