"""New safetensors files: where each tensor lies, and writing a rank's piece of one at its place."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.sources import HF_INDEX, SAFETENSORS_DTYPES
from shardkit.core.checkpoint.stored import memory_of
from shardkit.core.parameters.region import Box, Region

_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class SafetensorsLayout:
    """The files for some tensors: `model.safetensors`, or several and their index, named as Hugging Face names them.

    Attributes:
        heads: by file, its header and the number of bytes behind it.
        places: by name of a tensor, its file and the offset of its first byte.
    """

    heads: dict[str, tuple[bytes, int]]
    places: dict[str, tuple[str, int]]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        file_bytes: int | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> SafetensorsLayout:
        """Lays out tensors of a dtype and a shape in files of at most `file_bytes` each, unless one tensor is larger.

        `notes` are texts for the metadata of the first file. Raises CheckpointError for dtypes that safetensors lacks.
        """
        groups: list[list[str]] = [[]]
        filled = 0
        for name, (dtype, shape) in tensors.items():
            if dtype not in _DTYPE_NAMES:
                raise CheckpointError(
                    f"'{name}' has dtype {dtype}, which safetensors does not support; write a file of torch.save"
                )
            nbytes = math.prod(shape) * dtype.itemsize
            if file_bytes is not None and groups[-1] and filled + nbytes > file_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += nbytes
        count = len(groups)
        files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        layout = cls({}, {})
        for file, group in zip(files if count > 1 else ["model.safetensors"], groups, strict=True):
            extra = {} if layout.heads or notes is None else notes
            layout._add(file, {name: tensors[name] for name in group}, {"format": "pt", **extra})
        return layout

    def _add(
        self, file: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], notes: Mapping[str, str]
    ) -> None:
        header: dict[str, Any] = {"__metadata__": notes}
        end = 0
        for name, (dtype, shape) in tensors.items():
            at, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [at, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self.heads[file] = struct.pack("<Q", len(text)) + text, end
        for name in tensors:
            self.places[name] = file, 8 + len(text) + header[name]["data_offsets"][0]

    def create(self, directory: Path) -> None:
        """Creates the files in their full size, without values. The first one last: when it exists, all do."""
        for file, (head, nbytes) in reversed(self.heads.items()):
            with (directory / file).open("wb") as opened:
                opened.write(head)
                opened.truncate(len(head) + nbytes)

    def write_index(self, directory: Path) -> None:
        """Writes the index, if there are several files."""
        if len(self.heads) > 1:
            names = {name: file for name, (file, _) in self.places.items()}
            index = {"metadata": {"total_size": sum(n for _, n in self.heads.values())}, "weight_map": names}
            (directory / HF_INDEX).write_text(json.dumps(index, indent=2))


def write_piece(file: BinaryIO, offset: int, shape: Sequence[int], region: Region, piece: torch.Tensor) -> None:
    """Writes a rank's piece of a tensor of `shape` whose first byte is at `offset`, on the CPU.

    Only bytes of the piece are written, since other ranks write theirs at the same time.
    """
    for in_full, in_piece in region.boxes():
        values = piece[in_piece].reshape(-1)
        length, starts = _runs(shape, in_full)
        for start, run in zip(starts, values.split(length), strict=True):
            file.seek(offset + start * values.element_size())
            file.write(memory_of(run))


def _runs(shape: Sequence[int], box: Box) -> tuple[int, Iterator[int]]:
    """Length and first elements of the runs that a box of a tensor of `shape` has in row-major order."""
    sizes = [one.stop - one.start for one in box]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = len(shape)  # dims from here on are whole
    while cut and sizes[cut - 1] == shape[cut - 1]:
        cut -= 1
    outer = max(cut - 1, 0)
    first = sum(one.start * stride for one, stride in zip(box, strides, strict=True))
    steps = ([index * strides[dim] for index in range(sizes[dim])] for dim in range(outer))
    return math.prod(sizes[outer:]), (first + sum(index) for index in itertools.product(*steps))
