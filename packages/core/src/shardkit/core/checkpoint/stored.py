"""Tensors stored in files, whole or in parts and in any order of dims, read by ranges without holding a whole tensor.

Every offline conversion streams from these, whatever the source format.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.index import Index
from shardkit.core.checkpoint.leaves import LeafPath, name_of, unflatten, walk
from shardkit.core.checkpoint.torch_files import release_pages
from shardkit.core.tensors import bytes_of


def memory_of(tensor: torch.Tensor) -> memoryview:
    """`bytes_of` a CPU tensor, readable and writable."""
    flat: Any = bytes_of(tensor).numpy()
    return memoryview(flat)


CHUNK_BYTES = 32 * 2**20
"""How much of a tensor is in memory at a time; a row that is longer is read whole."""

Read = Callable[[int, int], torch.Tensor]

Slab = tuple[int, int, torch.Tensor]
"""First and last element of a range of a tensor, and its values."""


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a tensor in row-major order.

    `read(low, high)` gives elements low to high of the *part*, a 1-D copy. They come from `files`.
    """

    start: int
    stop: int
    read: Read
    files: tuple[str, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, made of consecutive parts."""

    path: LeafPath
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        edges = [0, *(edge for part in self.parts for edge in (part.start, part.stop)), self.numel]
        assert edges[::2] == edges[1::2], f"'{self.name}' of shape {self.shape} has the parts {edges[1:-1]}"

    @classmethod
    def of(
        cls, path: LeafPath, dtype: torch.dtype, shape: tuple[int, ...], read: Read, files: Iterable[str]
    ) -> StoredTensor:
        """A stored tensor that `read` provides."""
        numel = math.prod(shape)
        return cls(path, dtype, shape, (Part(0, numel, read, tuple(files)),) if numel else ())

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def files(self) -> dict[str, None]:
        """The files of its parts."""
        return dict.fromkeys(file for part in self.parts for file in part.files)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def row(self) -> int:
        """Elements of one index of dim 0; all of a 0-dim tensor."""
        return math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        """Rows of dim 0; a 0-dim tensor is one."""
        return self.shape[0] if self.shape else 1

    def read(self, low: int, high: int) -> torch.Tensor:
        """Elements [low, high), 1-D."""
        pieces = [
            part.read(max(low, part.start) - part.start, min(high, part.stop) - part.start)
            for part in self.parts
            if max(low, part.start) < min(high, part.stop)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=self.dtype)

    def same_values(self, other: StoredTensor) -> bool:
        """Whether both have one shape, one dtype, and the same bytes."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        return all(
            torch.equal(self.read(low, high).view(torch.uint8), other.read(low, high).view(torch.uint8))
            for low, high in self.ranges()
        )

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of elements that make up the tensor: whole rows, each of about CHUNK_BYTES."""
        step = self.row * max(1, CHUNK_BYTES // max(1, self.row * self.dtype.itemsize))
        for low in range(0, self.numel, max(1, step)):
            yield low, min(low + step, self.numel)

    def slabs(self) -> Iterator[torch.Tensor]:
        """All values, as 1-D tensors."""
        for low, high in self.ranges():
            yield self.read(low, high)


def paths_of(value: Any, path: LeafPath = ()) -> Iterator[tuple[LeafPath, Any]]:
    """The leaves of a state to convert: tensors, empty dicts, and every other value that holds no tensors and is not a
    plain dict: a Counter stays a Counter.
    """
    return walk(value, _is_taken_apart, path)


def _is_taken_apart(value: Any) -> bool:
    if type(value) in (dict, OrderedDict):
        return bool(value)
    return (isinstance(value, Mapping) or type(value) in (list, tuple)) and _holds_tensors(value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_holds_tensors, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor | StoredTensor)


@dataclass
class Checkpoint:
    """The contents of a source.

    Attributes:
        kind: "FULL", "SHARDED", "LOCAL", "DCP" or "safetensors".
        files: the files that it was read from.
        world_size: number of ranks that wrote it; 1 for one file.
        tensors: by path, the keys that lead to it: ("model", "0.weight"), ("optim", "state", "0.weight", "exp_avg").
        objects: all other values, by path.
        notes: remarks for the user on how it was read.
        config: for LOCAL files, how the model is wrapped, in the form of `--config`.
        about: for a directory, its step, world size, info, empty mappings and order.
    """

    kind: str
    files: list[str]
    world_size: int = 1
    tensors: dict[LeafPath, StoredTensor] = field(default_factory=dict)
    objects: dict[LeafPath, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    about: Index = field(default_factory=lambda: Index({}, {}, {}))

    def add(self, path: LeafPath, value: Any, file: object) -> None:
        """Adds a leaf: a stored tensor, a mapped tensor of a file, or an object."""
        if isinstance(value, StoredTensor):
            self.tensors[path] = value
        elif isinstance(value, torch.Tensor):
            self.tensors[path] = whole(path, value, str(file))
        else:
            self.objects[path] = value

    def nested(self, leaves: Mapping[LeafPath, Any]) -> dict[str, Any]:
        """Rebuilds the nested state from values by path."""
        state: dict[str, Any] = unflatten(self.about.in_order(leaves))
        return state

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def bound_bytes(self) -> int:
        """Most bytes of tensors in memory at a time during a conversion: one slab each read, hashed and written."""
        largest = max(
            (min(t.nbytes, max(CHUNK_BYTES, t.row * t.dtype.itemsize)) for t in self.tensors.values()), default=0
        )
        return 4 * largest + 4096 * len(self.tensors)


def by_rows(dtype: torch.dtype, shape: tuple[int, ...], fill: Callable[[tuple[int, ...], torch.Tensor], None]) -> Read:
    """Reads ranges of a tensor from rows: `fill(offsets, target)` copies the box at these offsets into a CPU tensor."""
    row, dims = math.prod(shape[1:]), len(shape)

    def read(low: int, high: int) -> torch.Tensor:
        first, last = low // row, -(-high // row)
        rows = torch.empty((last - first, *shape[1:])[:dims], dtype=dtype, device="cpu")
        fill((first, *[0] * dims)[:dims], rows)
        return rows.view(-1)[low - first * row : high - first * row]

    return read


def whole(path: tuple[Any, ...], tensor: torch.Tensor, file: str) -> StoredTensor:
    """A stored tensor that consists of one mapped tensor of one file."""
    return StoredTensor.of(path, tensor.dtype, tuple(tensor.shape), mapped_reader(name_of(path), tensor, file), [file])


def mapped_reader(name: str, tensor: torch.Tensor, file: str) -> Read:
    """Reads ranges of a mapped tensor. Raises CheckpointError unless it is a plain dense tensor in memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(
            f"'{name}' in {file} is a {type(tensor).__name__}, which is not converted; load it where it was saved, and "
            "save it with torch.distributed.checkpoint"
        )
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise CheckpointError(
            f"'{name}' in {file} is a tensor of {tensor.layout} on {tensor.device}; only dense tensors in memory are "
            "converted; save it as one"
        )
    memory, first = tensor.detach(), tensor.storage_offset()

    def fetch(low: int, high: int) -> torch.Tensor:
        return memory.as_strided((high - low,), (1,), first + low).resolve_conj().resolve_neg()

    return Memory(tuple(memory.shape), memory.stride(), memory.dtype, fetch, lambda: release_pages(memory)).read


@dataclass(frozen=True)
class Memory:
    """A tensor's elements in memory order."""

    shape: tuple[int, ...]  # shape, strides, dtype: of the tensor
    strides: tuple[int, ...]
    dtype: torch.dtype
    # elements [start, stop) of memory, counted from the tensor's first one: 1-D, perhaps a view
    fetch: Callable[[int, int], torch.Tensor]
    done: Callable[[], None]  # called when the fetched elements are not needed any more

    def read(self, low: int, high: int) -> torch.Tensor:
        """Elements [low, high) in row-major order: a copy."""
        expected = row_major_strides(self.shape)
        if low >= high or all(
            size < 2 or seen == needed for size, seen, needed in zip(self.shape, self.strides, expected, strict=True)
        ):
            copy = self.fetch(low, high).clone()
            self.done()
            return copy
        row = self.row
        first, last = low // row, -(-high // row)
        return self.rows(first, last).view(-1)[low - first * row : high - first * row]

    @property
    def row(self) -> int:
        return math.prod(self.shape[1:])

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows in row-major order. Fetches pieces along the dim with the largest stride, so that each piece is a range
        of memory of about CHUNK_BYTES.
        """
        sizes = (last - first, *self.shape[1:])
        dim = max(range(len(sizes)), key=lambda one: (sizes[one] > 1, self.strides[one]))
        count = max(1, CHUNK_BYTES // max(1, self.strides[dim] * self.dtype.itemsize))
        rows = torch.empty(sizes, dtype=self.dtype)
        for at in range(0, sizes[dim], count):
            part = [*sizes[:dim], min(count, sizes[dim] - at), *sizes[dim + 1 :]]
            start = first * self.strides[0] + at * self.strides[dim]
            span = 1 + sum((size - 1) * stride for size, stride in zip(part, self.strides, strict=True))
            found = self.fetch(start, start + span)
            rows.narrow(dim, at, part[dim]).copy_(found.as_strided(part, self.strides, found.storage_offset()))
            self.done()
        return rows


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1] if shape else ()
