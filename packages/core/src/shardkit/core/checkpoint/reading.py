"""Reads files into tensors: which bytes of which chunk each rank needs, whatever ranks and meshes wrote them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.index import Chunk, Index, ObjectEntry, TensorEntry
from shardkit.core.checkpoint.leaves import LeafPath, name_of, unflatten
from shardkit.core.checkpoint.location import Location
from shardkit.core.checkpoint.plan import boxes_of
from shardkit.core.checkpoint.stock_metadata import METADATA
from shardkit.core.checkpoint.stored import (
    CHUNK_BYTES,
    Checkpoint,
    Memory,
    StoredTensor,
    by_rows,
    memory_of,
    paths_of,
    row_major_strides,
)
from shardkit.core.checkpoint.torch_files import archive_of, layout_in, load_torch_bytes, values_in
from shardkit.core.checkpoint.verified_file import VerifiedFile, hashing_threads
from shardkit.core.runtime.mapped import briefly_in_memory

T = TypeVar("T")

Span = tuple[int, int]


@dataclass(frozen=True)
class Read:
    """A part of a chunk and its target: `spans` are (first, stop) in the chunk; `target` has their sizes."""

    name: str
    dtype: torch.dtype
    chunk: Chunk
    spans: tuple[Span, ...]
    target: torch.Tensor


def reads_of(entry: TensorEntry, offsets: Iterable[int], target: torch.Tensor) -> Iterator[Read]:
    """The reads that fill `target`, the box of a tensor at `offsets`."""
    box = [(low, low + size) for low, size in zip(offsets, target.shape, strict=True)]
    for chunk in entry.chunks:
        spans, slices = [], []
        for (low, stop), start, size in zip(box, chunk.offsets, chunk.sizes, strict=True):
            first, last = max(low, start), min(stop, start + size)
            if first >= last:
                break
            spans.append((first - start, last - start))
            slices.append(slice(first - low, last - low))
        else:
            if chunk.numel:
                yield Read(entry.name, entry.dtype, chunk, tuple(spans), target[tuple(slices)])


def read_tensors(directory: Location, index: Index, wanted: Iterable[tuple[LeafPath, torch.Tensor]]) -> None:
    """Fills tensors in place, each rank its own part, with verified bytes, whichever ranks wrote the checkpoint.

    Not collective. Raises CheckpointError, before anything changes, if a tensor is missing in the checkpoint or has
    another shape or dtype there. Raises DamagedCheckpointError for a damaged file; tensors may be partly filled then.
    """
    reads: list[Read] = []
    for path, tensor in wanted:
        entry = index.tensors.get(name_of(path))
        if entry is None:
            raise CheckpointError(
                f"{name_of(path)}: the checkpoint {directory} has no such tensor, expected one of shape "
                f"{tuple(tensor.shape)}; build the model that was saved"
            )
        if entry.shape != tuple(tensor.shape) or entry.dtype != tensor.dtype:
            raise CheckpointError(
                f"{name_of(path)}: the checkpoint {directory} has shape {entry.shape} and {entry.dtype}, expected "
                f"{tuple(tensor.shape)} and {tensor.dtype}: it is of another model, or of other settings; "
                "build the model that was saved"
            )
        for offsets, _, values in boxes_of(path, tensor):
            reads.extend(reads_of(entry, offsets, values))
    _run(directory, index, reads)


def read_objects(directory: Location, index: Index, names: Iterable[str]) -> dict[LeafPath, Any]:
    """Values that are not tensors, by path. Nothing in the checkpoint is executed."""
    entries = [index.objects[name] for name in names]
    found = {}
    for one, data in raw_objects(directory, index, entries):
        found[one.path] = load_torch_bytes(data, f"{name_of(one.path)} in {directory / one.file}")
    return {one.path: found[one.path] for one in entries}


def raw_objects(
    directory: Location, index: Index, entries: Iterable[ObjectEntry]
) -> Iterator[tuple[ObjectEntry, bytes]]:
    """The bytes written by torch.save for each value, in file order."""
    for file, one in _in_files(directory, index, entries, lambda one: (one.file, one.offset)):
        yield one, file.read(one.offset, one.length)


def _in_files(
    directory: Location, index: Index, items: Iterable[T], place: Callable[[T], tuple[Any, ...]]
) -> Iterator[tuple[VerifiedFile, T]]:
    """Items by file, in the order in which they lie there, so that every block is read and hashed once. `place` returns
    the name of the file and the sort key.
    """
    with hashing_threads() as beside:
        for name, below in itertools.groupby(sorted(items, key=place), lambda one: place(one)[0]):
            with VerifiedFile(directory, index.files[name], beside) as file:
                for one in below:
                    yield file, one


@torch.no_grad()
def _run(directory: Location, index: Index, reads: list[Read]) -> None:
    for file, read in _in_files(directory, index, reads, lambda one: (one.chunk.file, one.chunk.offset, one.spans)):
        _fill(file, read)


def _fill(file: VerifiedFile, read: Read) -> None:
    start, layout = _place(file, read)
    sizes, target = read.chunk.sizes, read.target
    first, stop = read.spans[0] if sizes else (0, 1)
    whole_rows = all(span == (0, size) for span, size in zip(read.spans[1:], sizes[1:], strict=True))
    as_it_is = target.is_contiguous() and not (target.is_conj() or target.is_neg())
    row = math.prod(sizes[1:]) * read.dtype.itemsize
    if layout is None and whole_rows and target.device.type == "cpu" and as_it_is:
        memory = memory_of(target)
        for at in range(0, len(memory), CHUNK_BYTES):
            part = memory[at : at + CHUNK_BYTES]
            with briefly_in_memory(part):
                file.read_into(start + first * row + at, part)
        return

    def fetch(low: int, high: int) -> torch.Tensor:
        values = torch.empty(high - low, dtype=read.dtype, device="cpu")
        file.read_into(start + low * read.dtype.itemsize, memory_of(values))
        values = values.conj_physical() if layout is not None and layout.is_conj() else values
        return -values if layout is not None and layout.is_neg() else values

    strides = row_major_strides(sizes) if layout is None else layout.stride()
    chunk = Memory(sizes, strides, read.dtype, fetch, lambda: None)
    if not sizes:
        target.copy_(fetch(0, 1).view(()))
        return
    rows = max(1, CHUNK_BYTES // max(1, row))
    inner = tuple(slice(low, high) for low, high in read.spans[1:])
    for low in range(first, stop, rows):
        high = min(low + rows, stop)
        slab = chunk.read(low * chunk.row, high * chunk.row).view(high - low, *sizes[1:])
        target[low - first : high - first].copy_(slab[(slice(None), *inner)])


def _place(file: VerifiedFile, read: Read) -> tuple[int, torch.Tensor | None]:
    """Where the first element of the chunk lies in its file, and a meta tensor with the layout of the others; None for
    row-major.

    Stock writes a tensor as it lies in memory: transposed, or with the channels last. If the archive's description is
    not the one that torch.save writes for a contiguous tensor, it is read.
    """
    chunk, itemsize = read.chunk, read.dtype.itemsize
    if chunk.values is not None:
        return chunk.values, None
    start, nbytes = values_in(file.opened, chunk.offset, chunk.length, str(file.path))
    contiguous = archive_of(read.dtype, chunk.sizes).description
    if nbytes == chunk.numel * itemsize and contiguous in file.read(chunk.offset, start - chunk.offset):
        return start, None
    layout = layout_in(file.opened, chunk.offset, chunk.length, nbytes, str(file.path))
    if (tuple(layout.shape), layout.dtype) != (chunk.sizes, read.dtype):
        raise DamagedCheckpointError(
            f"{read.name}: its chunk at {chunk.offsets} in {file.path} is {tuple(layout.shape)} of {layout.dtype}, "
            f"expected {chunk.sizes} of {read.dtype}"
        )
    return start + int(layout.storage_offset()) * itemsize, layout


def stored_tensors(directory: Location, index: Index) -> list[StoredTensor]:
    """The tensors of a checkpoint; reading them verifies checksums."""
    found = []
    for one in index.tensors.values():
        read = by_rows(one.dtype, one.shape, partial(read_box, directory, index, one))
        files = dict.fromkeys(str(directory / chunk.file) for chunk in one.chunks)
        found.append(StoredTensor.of(one.path, one.dtype, one.shape, read, files))
    return found


def read_box(
    directory: Location, index: Index, entry: TensorEntry, offsets: tuple[int, ...], target: torch.Tensor
) -> None:
    """Fills `target` with the box of a tensor at `offsets`."""
    _run(directory, index, list(reads_of(entry, offsets, target)))


def source_of(directory: Location, index: Index) -> Checkpoint:
    """The tensors of a checkpoint directory as a source of conversions."""
    ranks = index.world_size or max(1, len(index.files.keys() - {METADATA}))
    tensors = {one.path: one for one in stored_tensors(directory, index)}
    return Checkpoint("DCP", [str(directory)], ranks, tensors, about=index)


def checkpoint_of(directory: Location, index: Index) -> Checkpoint:
    """A whole checkpoint directory as a source of conversions.

    Lists without tensors, which torch.distributed.checkpoint takes apart, are put together again. Raises
    DamagedCheckpointError for damaged objects.
    """
    checkpoint = source_of(directory, index)
    leaves = {**checkpoint.tensors, **read_objects(directory, index, index.objects)}
    checkpoint.tensors = {}
    for path, value in paths_of(unflatten(leaves, index.empties)):
        checkpoint.add(path, value, directory)
    return checkpoint
