"""What torch.save writes: where its values lie, laid out before there are any, and read with care.

An archive of one tensor is some bytes, the values, some bytes, and only the values depend on the values. So a data file
of torch.distributed.checkpoint, a row of such archives, can be laid out before there are any values, and every rank
knows the length of every other rank's archives. Files of others are loaded with weights_only=True, and refused if they
ask for too much memory.
"""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import pickle
import pickletools
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.pickled import check_pickle

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
    Raises DamagedCheckpointError if these bytes are no such archive, or one of several tensors.
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


@dataclass(frozen=True)
class Layout:
    """A tensor in a storage; strides, and the offset of the first element, in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False


def layout_in(file: IO[bytes], offset: int, length: int, nbytes: int, name: str) -> Layout:
    """The layout of the one tensor whose archive is bytes [offset, offset + length) of a file.

    `nbytes` are those of its storage, in which the tensor must lie; `name` is for messages. Raises
    DamagedCheckpointError for anything but a plain tensor that lies in its storage.
    """
    where = f"{name}: bytes {offset} to {offset + length}"
    try:
        window: IO[bytes] = Window(file, offset, length)  # type: ignore[assignment]  # all that zipfile asks for
        data = _pickle_in(window, length, where)
        check_pickle(data)
        if any(opcode.name == "BUILD" for opcode, _, _ in pickletools.genops(data)):  # it could change our functions
            raise pickle.UnpicklingError("BUILD is not allowed in the description of a plain tensor")
        layout = _LayoutUnpickler(io.BytesIO(data)).load()
        if not isinstance(layout, Layout) or len(layout.shape) != len(layout.strides):
            raise ValueError("no tensor")
        numbers = (*layout.shape, *layout.strides, layout.offset)
        if any(type(one) is not int or not 0 <= one < 2**62 for one in numbers):
            raise ValueError(f"shape {layout.shape}, strides {layout.strides}, offset {layout.offset}")
    except Exception as error:  # damaged pickles fail in any way
        raise DamagedCheckpointError(f"{where} hold no plain tensor: {error}") from error
    reach = 1 + sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True))
    needed = 0 if 0 in layout.shape else (layout.offset + reach) * layout.dtype.itemsize
    if needed > nbytes:
        raise DamagedCheckpointError(f"{where} hold a storage of {nbytes} bytes; its tensor needs {needed}")
    return layout


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
        _, dtype, _, _, _ = pid
        return dtype


def _layout_v2(storage: torch.dtype, offset: int, size: Any, stride: Any, *rest: Any) -> Layout:
    marks = rest[2] if len(rest) > 2 and rest[2] else {}
    if not marks.keys() <= {"conj", "neg"}:
        raise pickle.UnpicklingError(f"a tensor with {marks}")
    return Layout(storage, tuple(size), tuple(stride), offset, bool(marks.get("conj")), bool(marks.get("neg")))


def _layout_v3(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, dtype: Any, *rest: Any
) -> Layout:
    return _layout_v2(dtype, offset, size, stride, requires_grad, hooks, *rest)


_MAX_DEPTH = 100
_MAX_EXPANDED = 2**25


def load_torch_file(path: Path, allowed: Sequence[Any] = ()) -> Any:
    """The object in a file written by torch.save. Its tensors are mapped: values are read when they are used.

    `allowed` are classes and functions that it may use beside tensors and plain containers, as
    `torch.serialization.safe_globals` takes them. Raises DamagedCheckpointError for a file that is no such file, is
    truncated, compressed, or claims more than it has; CheckpointError for a missing one, and for one that asks for
    anything that is not allowed.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist, or is not a file")
    with path.open("rb") as file:
        return _loaded(file, path, path.stat().st_size, str(path), allowed)


def load_torch_bytes(data: bytes, name: str, allowed: Sequence[Any] = ()) -> Any:
    """The object in bytes written by torch.save; `name` is for messages. Raises as `load_torch_file`."""
    return _loaded(io.BytesIO(data), None, len(data), name, allowed)


def _loaded(file: IO[bytes], path: Path | None, length: int, name: str, allowed: Sequence[Any]) -> Any:
    try:
        pickled = _pickle_in(file, length, name)
        check_pickle(pickled)
        with torch.serialization.safe_globals(list(allowed)):
            source: Any = file if path is None else path
            value = torch.load(source, map_location="cpu", mmap=path is not None, weights_only=True)
        _check_size(value, length, len(pickled))
        return value
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        told = error.__context__ if isinstance(error.__context__, pickle.UnpicklingError) else error
        reason = str(told).strip().partition(" Please use")[0].partition("\n")[0]
        raise CheckpointError(
            f"{name} holds more than tensors and plain containers, which is refused: {reason}"
        ) from error
    except Exception as error:  # whatever damaged bytes lead zipfile, pickle and torch into
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DamagedCheckpointError(
            f"{name} ({length} bytes) is not a whole file of torch.save's zip format: {type(error).__name__}: {reason}"
        ) from error


def _pickle_in(file: IO[bytes], length: int, name: str) -> bytes:
    """The pickle of an archive whose entries are neither compressed nor larger than the archive."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        claimed = sum(one.file_size for one in entries)
        if claimed > length or any(one.compress_type != zipfile.ZIP_STORED for one in entries):
            raise DamagedCheckpointError(f"{name}: its {length} bytes are compressed or claim to hold {claimed}")
        pickles = [one for one in entries if one.filename.split("/")[-1] == "data.pkl"]
        if len(pickles) != 1 or len({one.filename for one in entries}) != len(entries):
            raise DamagedCheckpointError(
                f"{name} is not a file of torch.save: it holds {len(pickles)} pickles and {len(entries)} entries, "
                "expected one pickle, and entries of different names"
            )
        data = archive.open(pickles[0]).read(pickles[0].file_size)
    file.seek(0)
    return data


def _check_size(value: Any, length: int, pickled: int) -> None:
    """Refuses values that take long to walk over, and tensors of memory that the file does not have.

    Containers that contain each other, or share what they contain, may look far larger than they are.
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
    """The bytes of a tensor's storage that no tensor before had and no file has; raises for a tensor too large."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return 0  # refused, or looked at, by whoever knows what to do with them
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
    """Lets the system take back the memory of a mapped tensor; it is read from the file again when it is needed."""
    storage = tensor.untyped_storage()
    if sys.platform != "linux" or storage.resizable():  # memory that is no file's would lose its values
        return
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Lets the system take back memory that was freed: glibc keeps much of what tensors of some megabytes were in."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
