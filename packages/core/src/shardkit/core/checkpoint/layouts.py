"""How the tensor in an archive of torch.save lies in its storage: transposed, perhaps, or with the channels last."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import IO, Any

import torch

from shardkit.core.checkpoint.archive import Window
from shardkit.core.checkpoint.errors import DamagedCheckpointError
from shardkit.core.checkpoint.pickled import check_pickle

__all__ = ["Layout", "layout_in"]


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

    `nbytes` are those of its storage, in which the tensor must lie; `name` is for messages.

    Raises:
        DamagedCheckpointError: for anything but a plain tensor that lies in its storage.
    """
    where = f"{name}: bytes {offset} to {offset + length}"
    try:
        window: IO[bytes] = Window(file, offset, length)  # type: ignore[assignment]  # all that zipfile asks for
        with zipfile.ZipFile(window) as archive:
            (pickled,) = (one for one in archive.infolist() if one.filename.split("/")[-1] == "data.pkl")
            data = archive.read(pickled) if pickled.file_size <= length else b""
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
