"""What torch.save has written: loaded with weights_only=True, and refused if it asks for too much memory."""

from __future__ import annotations

import ctypes
import io
import mmap
import pickle
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.pickled import check_pickle

__all__ = ["load_torch_bytes", "load_torch_file", "release_pages"]

_MAX_DEPTH = 100
_MAX_EXPANDED = 2**25


def load_torch_file(path: Path, allowed: Sequence[Any] = ()) -> Any:
    """The object in a file written by torch.save. Its tensors are mapped: values are read when they are used.

    Args:
        path: of the file.
        allowed: classes and functions that it may use beside tensors and plain containers, as
            `torch.serialization.safe_globals` takes them.

    Raises:
        DamagedCheckpointError: for a file that is no such file, is truncated, compressed, or claims more than it has.
        CheckpointError: for a missing one, and for one that asks for anything that is not allowed.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist, or is no file")
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
