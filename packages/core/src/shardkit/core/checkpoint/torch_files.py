"""Files of torch.save: laid out before there are values, and read safely.

An archive of one tensor is a head, the values, and a tail; only the values part depends on the values. A data file of
torch.distributed.checkpoint is a row of such archives, so it can be laid out before there are values, and every rank
knows the lengths of all ranks' archives. Foreign files are loaded with weights_only=True, and are refused if they
request too much memory.
"""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import pickle
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError, damage_of
from shardkit.core.checkpoint.pickled import check_pickle

ALIGNMENT = 64
"""Values start at multiples of this in a data file, so that they can be copied to and from its image as tensors."""


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
        return len(self.head) + self.nbytes + len(self.tail)

    @property
    def description(self) -> bytes:
        """The pickle in the head, from which torch.load rebuilds the tensor."""
        return self.head[self.head.index(b"\x80\x02") : self.head.index(b"PK\x07\x08")]

    def place(self, end: int) -> int:
        """Where the archive starts in a file that is filled up to `end`: its values are aligned."""
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
    """The bytes that torch.save writes before and after the values; it seeks over the space for them."""

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
    """A part of a file as a file object, for zipfile."""

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


def _window(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    window: Any = Window(file, offset, length)  # has everything that zipfile and torch.load use
    found: IO[bytes] = window
    return found


def values_in(file: IO[bytes], offset: int, length: int, name: str) -> tuple[int, int]:
    """Where the values of the single tensor in bytes [offset, offset + length) of a file lie: (offset, bytes). Raises
    DamagedCheckpointError if these bytes are not such an archive, or hold several tensors.
    """
    found = storages_in(file, offset, length, name)
    if len(found) != 1:
        raise DamagedCheckpointError(
            f"{name}: bytes {offset} to {offset + length} hold {len(found)} storages, expected one"
        )
    return next(iter(found.values()))


def storages_in(file: IO[bytes], offset: int, length: int, name: str) -> dict[str, tuple[int, int]]:
    """Where the values of each storage in a torch.save archive lie: key -> (offset, bytes). Raises the same."""
    window, found = _window(file, offset, length), {}
    with (
        damage_of(f"{name}: bytes {offset} to {offset + length}", "are not an archive of torch.save", (MemoryError,)),
        zipfile.ZipFile(window) as archive,
    ):
        for one in archive.infolist():
            if one.filename.split("/")[-2:-1] != ["data"]:
                continue
            if one.compress_type != zipfile.ZIP_STORED:
                raise DamagedCheckpointError("a compressed storage, which torch.save never writes")
            with archive.open(one):  # reads the header before the values, but no values
                start = window.tell()
            if start + one.file_size > length:
                raise DamagedCheckpointError(f"the storage inside claims {one.file_size} bytes")
            found[one.filename.split("/")[-1]] = offset + start, one.file_size
    return found


def layout_in(file: IO[bytes], offset: int, length: int, nbytes: int, name: str) -> torch.Tensor:
    """The single tensor in the archive at bytes [offset, offset + length) of a file, on the meta device: it shows the
    tensor's layout in its storage.

    `nbytes` is the size of its storage; `name` is for messages. Raises DamagedCheckpointError unless it is a plain
    tensor inside that storage.
    """
    where, window = f"{name}: bytes {offset} to {offset + length}", _window(file, offset, length)
    with damage_of(where, "hold no plain tensor", passing=()):
        check_pickle(_pickle_in(window, length))
        with torch.serialization.skip_data():  # older versions of torch would read the values and drop them
            tensor = torch.load(window, map_location="meta", weights_only=True)
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or vars(tensor):
            raise ValueError(f"a {type(tensor).__name__} with {vars(tensor)}")
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + reach) * tensor.itemsize if tensor.numel() else 0
        if needed > nbytes:
            raise DamagedCheckpointError(f"a storage of {nbytes} bytes, and its tensor needs {needed}")
    return tensor


_MAX_DEPTH = 100
_MAX_EXPANDED = 2**25


def load_torch_file(path: Path, allowed: Sequence[Any] = ()) -> Any:
    """The object in a file written by torch.save. Its tensors are mapped: values are read on use.

    `allowed` lists classes and functions that it may use besides tensors and plain containers, as for
    `torch.serialization.safe_globals`. Raises DamagedCheckpointError if the file is not one of torch.save, is
    truncated, compressed, or claims more than it has; CheckpointError if it is missing, or uses anything that is not
    allowed.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist, or is not a file; correct the path")
    with path.open("rb") as file:
        return _loaded(file, path, path.stat().st_size, str(path), allowed)


def load_torch_bytes(data: bytes, name: str, allowed: Sequence[Any] = ()) -> Any:
    """The object in bytes written by torch.save; `name` is for messages. Raises as `load_torch_file`."""
    return _loaded(io.BytesIO(data), None, len(data), name, allowed)


def _loaded(file: IO[bytes], path: Path | None, length: int, name: str, allowed: Sequence[Any]) -> Any:
    with damage_of(name, f"({length} bytes) is not a whole file of torch.save's zip format", passing=()):
        try:
            pickled = _pickle_in(file, length)
            check_pickle(pickled)
            with torch.serialization.safe_globals(list(allowed)):
                source: Any = file if path is None else path
                value = torch.load(source, map_location="cpu", mmap=path is not None, weights_only=True)
            _check_size(value, length, len(pickled))
            return value
        except pickle.UnpicklingError as error:
            told = error.__context__ if isinstance(error.__context__, pickle.UnpicklingError) else error
            reason = str(told).strip().partition(" Please use")[0].partition("\n")[0]
            raise CheckpointError(
                f"{name} holds more than tensors and plain containers, which is refused: {reason}; "
                "save it without the rest"
            ) from error


def _pickle_in(file: IO[bytes], length: int) -> bytes:
    """The pickle of an archive. Its entries must be neither compressed nor larger than the archive."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        claimed = sum(one.file_size for one in entries)
        if claimed > length or any(one.compress_type != zipfile.ZIP_STORED for one in entries):
            raise DamagedCheckpointError(f"its {length} bytes are compressed or claim to hold {claimed}")
        pickles = [one for one in entries if one.filename.split("/")[-1] == "data.pkl"]
        names = {one.filename.lower() for one in entries}  # torch does not tell upper case from lower case
        if len(pickles) != 1 or len(names) != len(entries):
            raise DamagedCheckpointError(
                f"not a file of torch.save: it holds {len(pickles)} pickles and {len(entries)} entries, expected one "
                "pickle, and entries of different names"
            )
        data = archive.open(pickles[0]).read(pickles[0].file_size)
    file.seek(0)
    return data


def _check_size(value: Any, length: int, pickled: int) -> None:
    """Refuses values that take long to traverse, and tensors with more memory than the file.

    Containers that contain each other, or share contents, may appear far larger than they are.
    """
    budget, unmapped = 100_000 + 4 * pickled, 0
    stack = [(value, 0)]
    storages: set[int] = set()
    while stack:
        one, depth = stack.pop()
        budget -= 1
        if depth > _MAX_DEPTH or budget < 0:
            raise DamagedCheckpointError(
                f"its containers are nested more than {_MAX_DEPTH} deep, or contain each other too often"
            )
        if isinstance(one, torch.Tensor):
            unmapped += _check_tensor(one, length, storages)
        elif isinstance(one, dict):
            stack += [(below, depth + 1) for item in one.items() for below in item]
        elif isinstance(one, list | tuple | set | frozenset):
            stack += [(below, depth + 1) for below in one]
    if unmapped > length:
        raise DamagedCheckpointError(f"its tensors take {unmapped} bytes, and it has {length}")


def _check_tensor(tensor: torch.Tensor, length: int, storages: set[int]) -> int:
    """The bytes of a tensor's storage if it is new and not in a file; raises if the tensor is too large."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return 0  # refused or handled by the caller
    claimed = torch.Tensor.numel(tensor) * tensor.dtype.itemsize
    if claimed > max(length, _MAX_EXPANDED):
        raise DamagedCheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} would take {claimed} bytes; the file has {length}"
        )
    if shadowed := [name for name in vars(tensor) if hasattr(torch.Tensor, name)]:
        raise DamagedCheckpointError(f"a tensor with attributes that hide its own: {shadowed}")
    storage = tensor.untyped_storage()
    if not storage.resizable() or storage.data_ptr() in storages:
        return 0
    storages.add(storage.data_ptr())
    return storage.nbytes()


def release_pages(tensor: torch.Tensor) -> None:
    """Lets the system reclaim the memory of a mapped tensor; it is read from the file again when needed."""
    storage = tensor.untyped_storage()
    if sys.platform != "linux" or storage.resizable():  # memory outside a file would lose its values
        return
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Returns freed memory to the system: glibc keeps much of the memory of tensors of some megabytes."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
