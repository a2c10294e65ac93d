"""Where full tensors are read from: a dict in memory, a torch.save file or a safetensors file, piece by piece."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.torch_files import load_torch_file
from shardkit.core.region import Region

__all__ = [
    "SAFETENSORS_DTYPES",
    "DictSource",
    "Entry",
    "SafetensorsSource",
    "Source",
    "TorchFileSource",
    "open_file",
    "open_source",
]

SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a source."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(ABC):
    """Full tensors by name. Knowing what there is costs no reading of values."""

    entries: dict[str, Entry]
    """The tensors, in order."""

    objects: dict[str, Any]
    """What is there beside tensors: a module's extra state."""

    fingerprint: str | None = None
    """Equal on two ranks whose sources are the same file, None where only this process can read it."""

    @abstractmethod
    def read(self, name: str, region: Region) -> torch.Tensor:
        """A region of a tensor: a view or a copy, not to be written to."""


class DictSource(Source):
    """A dict of plain tensors in this process.

    Raises TypeError for a dict that is no flat dict of dense tensors.
    """

    def __init__(self, tensors: Mapping[str, Any], origin: str = "the source dict") -> None:
        self._tensors = dict(tensors)
        self.entries = {}
        self.objects = {}
        for name, value in self._tensors.items():
            if not isinstance(name, str):
                raise TypeError(f"{origin} has the key {name!r}, expected parameter names (str)")
            if isinstance(value, DTensor):
                raise TypeError(
                    f"{name}: {origin} holds a DTensor, expected full plain tensors; "
                    "load a sharded state with load_state_dict, or make it full with full_state_dict"
                )
            if isinstance(value, torch.Tensor):
                if value.layout is not torch.strided or value.is_quantized or value.is_meta:
                    what = "no values (meta device)" if value.is_meta else f"layout {value.layout}, {value.dtype}"
                    raise TypeError(f"{name}: {origin} has a tensor of {what}, expected a dense one")
                self.entries[name] = Entry(tuple(value.shape), value.dtype)
            elif isinstance(value, Mapping) and not _is_extra_state(name):
                raise TypeError(
                    f"{name}: {origin} is nested, expected a flat dict of name -> tensor; "
                    f"if the model is under this key, pass source[{name!r}] (import: --key {name})"
                )
            else:
                self.objects[name] = value

    def read(self, name: str, region: Region) -> torch.Tensor:
        return region.take(self._tensors[name].detach())


class TorchFileSource(DictSource):
    """A file written by torch.save, mapped into memory: a region is read from disk when it is copied from.

    Loaded with weights_only=True, so that nothing in the file is run; `key` if the tensors are in a dict in the dict.
    Raises ValueError for a file that is no dict, or that has none under `key`; and as `load_torch_file`.
    """

    def __init__(self, path: Path, key: str | None = None) -> None:
        state = load_torch_file(path)
        if not isinstance(state, Mapping):
            raise ValueError(f"{path} holds a {type(state).__name__}, expected a dict of name -> tensor")
        if key is not None and not isinstance(state.get(key), Mapping):
            raise ValueError(f"no dict under {key!r}, only {', '.join(map(str, state))}")
        state = state if key is None else state[key]
        super().__init__(state, str(path))
        self.fingerprint = _fingerprint(path, self.entries)


class SafetensorsSource(Source):
    """A safetensors file; a region is read straight from the file. Raises ImportError without `safetensors`."""

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                f"reading {path} needs the package safetensors; run: pip install 'shardkit-core[safetensors]'"
            ) from error
        # Any: the package is not annotated.
        opened: Any = safe_open(str(path), framework="pt")
        self._file = opened
        self._slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        self.objects = {}
        self.entries = {}
        for name, view in self._slices.items():
            kind = view.get_dtype()
            if kind not in SAFETENSORS_DTYPES:
                raise ValueError(f"{name}: dtype {kind} in {path}, expected one of {', '.join(SAFETENSORS_DTYPES)}")
            self.entries[name] = Entry(tuple(view.get_shape()), SAFETENSORS_DTYPES[kind])
        self.fingerprint = _fingerprint(path, self.entries)

    def read(self, name: str, region: Region) -> torch.Tensor:
        entry, view = self.entries[name], self._slices[name]
        if not entry.shape:
            whole: torch.Tensor = self._file.get_tensor(name)
            return whole
        boxes = list(region.boxes())
        if len(boxes) == 1:
            only: torch.Tensor = view[boxes[0][0]]
            return only
        piece = torch.empty(region.shape, dtype=entry.dtype)
        for in_file, in_piece in boxes:
            piece[in_piece] = view[in_file]
        return piece


def open_source(source: object) -> Source | None:
    """The source for what a user passes: a mapping, a path, or None for anything else. Raises as `open_file`."""
    if isinstance(source, Mapping):
        return DictSource(source)
    return open_file(Path(source)) if isinstance(source, str | os.PathLike) else None


def open_file(path: Path, key: str | None = None) -> Source:
    """The source for a file, whose kind is read off its first bytes, not its name.

    `key` as in `TorchFileSource`. Raises OSError for a file that cannot be opened, ValueError for one of an unknown
    kind, or of one that has nothing under keys; and what `TorchFileSource` and `SafetensorsSource` raise.
    """
    with path.open("rb") as file:
        head = file.read(9)
    if head.startswith(b"PK\x03\x04"):
        return TorchFileSource(path, key)
    if head[8:9] == b"{":
        if key is not None:
            raise ValueError(f"{path} is a safetensors file, all of it tensors: leave out the key {key!r}")
        return SafetensorsSource(path)
    raise ValueError(
        f"{path} is neither a safetensors file nor one written by torch.save in its zip format (the default since "
        "torch 1.6); write it again with torch.save(torch.load(path, weights_only=True), path)"
    )


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


def _fingerprint(path: Path, entries: dict[str, Entry]) -> str:
    """Of a file's size, time and index, not of its values: reading them all is what a lazy source avoids."""
    stat = path.stat()
    text = repr(
        (
            stat.st_size,
            stat.st_mtime_ns,
            sorted((name, entry.shape, str(entry.dtype)) for name, entry in entries.items()),
        )
    )
    return hashlib.sha256(text.encode()).hexdigest()
