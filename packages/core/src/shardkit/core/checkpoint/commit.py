"""From staged memory to a checkpoint: each rank's data file and note, the index of all, stock's metadata, the manifest.

Staging memory is the image of a rank's data file, with heads and tails of the archives there from the beginning. So
saving is one copy for each tensor, and writing is hashing and writing one range of memory: nothing that holds Python's
interpreter lock for long.

The note (`part-<rank>.json`) appears by a rename when the data file is on disk. It has the checksums of the file, and
what other ranks cannot know of it: objects, plain tensors, boxes that no layout describes. No process group is used, so
nothing here can hang on a rank that is gone, and nothing runs between the ranks while they train.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.index import (
    BLOCK_BYTES,
    DTYPES,
    MANIFEST,
    SAVE_ID,
    Chunk,
    File,
    Index,
    ObjectEntry,
    TensorEntry,
    dtype_name,
    pack,
    seal,
    unseal,
)
from shardkit.core.checkpoint.leaves import LeafPath, decode_path, encode_path, name_of
from shardkit.core.checkpoint.plan import Layout, Piece, Plan
from shardkit.core.checkpoint.stock_metadata import METADATA, stock_metadata
from shardkit.core.checkpoint.torch_files import archive_of
from shardkit.core.checkpoint.verified_file import checksum, read_small
from shardkit.core.torch_compat import foreach_copy_

__all__ = [
    "Header",
    "Image",
    "Part",
    "await_parts",
    "build_index",
    "data_file",
    "places",
    "read_part",
    "remove_notes",
    "write_file",
    "write_index",
    "write_part",
]


def places(pieces: Iterable[Piece], end: int = 0) -> tuple[list[int], int]:
    """Where each piece's archive begins in a data file that is filled up to `end`, and where the last one ends."""
    starts = []
    for piece in pieces:
        archive = archive_of(piece.dtype, piece.sizes)
        start = archive.place(end)
        starts.append(start)
        end = start + archive.length
    return starts, end


class Image:
    """The data file of `pieces`; its memory is kept from save to save.

    Attributes:
        pieces: what it has room for, in order.
        memory: uint8, the bytes of the file.
    """

    def __init__(self, pieces: Sequence[Piece], *, pinned: bool) -> None:
        self.pieces = tuple(pieces)
        self.pinned = pinned
        starts, end = places(pieces)
        self.memory = torch.zeros(end, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._views: list[torch.Tensor] = []
        for piece, start in zip(pieces, starts, strict=True):
            archive = archive_of(piece.dtype, piece.sizes)
            values, end = start + len(archive.head), start + archive.length
            self._write(start, archive.head)
            self._write(end - len(archive.tail), archive.tail)
            view = self.memory[values : values + archive.nbytes].view(piece.dtype).view(piece.sizes)
            self._views.append(view)

    def _write(self, at: int, data: bytes) -> None:
        if data:  # an archive of a tensor without elements is all head
            self.memory[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @torch.no_grad()
    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Copies the values of the pieces in. When it returns they may be changed again."""
        here = [(view, value) for view, value in zip(self._views, values, strict=True) if value.device.type == "cpu"]
        if here:
            foreach_copy_([view for view, _ in here], [value for _, value in here])
        devices = set()
        for view, value in zip(self._views, values, strict=True):
            if value.device.type != "cpu":
                view.copy_(value, non_blocking=self.pinned)
                devices.add(value.device)
        for device in devices:
            torch.get_device_module(device).current_stream(device).synchronize()

    def bytes(self) -> memoryview:
        """The memory."""
        array: Any = self.memory.numpy()
        return memoryview(array)


@dataclass(frozen=True)
class Part:
    """A rank's note.

    Attributes:
        nbytes, blocks: size and checksums of its data file; no blocks if it wrote none.
        told: pieces that lie in it behind those that layouts describe, in order.
        objects: path, offset and length of each object.
        empties: paths of empty mappings.
        order: of the leaves that it tells of, if it is not tensors first.
    """

    nbytes: int
    blocks: tuple[str, ...]
    told: tuple[Piece, ...]
    objects: tuple[tuple[LeafPath, int, int], ...]
    empties: tuple[LeafPath, ...]
    order: tuple[LeafPath, ...] = ()


def data_file(rank: int) -> str:
    """The name of a rank's data file, which is the one that stock gives it."""
    return f"__{rank}_0.distcp"


def _note(rank: int) -> str:
    return f"part-{rank}.json"


def write_file(path: Path, parts: Sequence[bytes | memoryview], progress: Callable[[int], object]) -> list[str]:
    """Writes parts one behind the other, and has the system put them on disk; returns the checksums of the blocks.

    Hashing, writing and syncing leave the interpreter to other threads.
    """
    sums = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for block in _blocks(parts):
            sums.append(checksum(block))
            done = 0
            while done < len(block):
                done += os.write(descriptor, block[done:])
            progress(len(block))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return sums


def _blocks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The bytes of all parts in blocks; only a block that lies in two parts is copied."""
    rest = b""
    for part in parts:
        view, start = memoryview(part), 0
        if rest:
            start = min(BLOCK_BYTES - len(rest), len(view))
            rest += view[:start]
            if len(rest) < BLOCK_BYTES:
                continue
            yield memoryview(rest)
        whole = start + (len(view) - start) // BLOCK_BYTES * BLOCK_BYTES
        for at in range(start, whole, BLOCK_BYTES):
            yield view[at : at + BLOCK_BYTES]
        rest = bytes(view[whole:])
    if rest:
        yield memoryview(rest)


def write_part(directory: Path, rank: int, image: memoryview, plan: Plan, progress: Callable[[int], object]) -> None:
    """Writes this rank's data file and then its note into a directory that is there. Raises OSError."""
    placed, end = [], len(image)
    for path, data in plan.objects:
        placed.append((path, end, len(data)))
        end += len(data)
    contents: list[bytes | memoryview] = [image, *(data for _, data in plan.objects)]
    document = {
        "nbytes": end,
        "blocks": write_file(directory / data_file(rank), contents, progress) if end else [],
        "told": [[encode_path(p.path), dtype_name(p.dtype), p.shape, p.offsets, p.sizes] for p in plan.told],
        "objects": [[encode_path(path), offset, length] for path, offset, length in placed],
        "empties": [encode_path(path) for path in plan.empties],
        "order": [encode_path(path) for path in plan.order],
    }
    temporary = directory / f"{_note(rank)}.tmp"
    temporary.write_bytes(seal(document))
    temporary.rename(directory / _note(rank))


def read_part(directory: Path, rank: int) -> Part | None:
    """A rank's note, None if it has not left one yet. Raises DamagedCheckpointError for one that is damaged."""
    path = directory / _note(rank)
    if not path.exists():
        return None
    found: dict[str, Any] = unseal(read_small(directory, path.name), str(path))
    try:
        return Part(
            int(found["nbytes"]),
            tuple(found["blocks"]),
            tuple(
                Piece(decode_path(path), DTYPES[dtype], tuple(shape), tuple(offsets), tuple(sizes))
                for path, dtype, shape, offsets, sizes in found["told"]
            ),
            tuple((decode_path(path), offset, length) for path, offset, length in found["objects"]),
            tuple(decode_path(path) for path in found["empties"]),
            tuple(decode_path(path) for path in found["order"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is not put together as a note of a rank: {error!r}") from error


def remove_notes(directory: Path, ranks: int) -> None:
    """Removes the notes, which the manifest has taken in."""
    for rank in range(ranks):
        (directory / _note(rank)).unlink()


_POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Header:
    """What a checkpoint says of itself beside its state."""

    step: int
    world_size: int
    info: dict[str, Any]


def await_parts(directory: Path, world_size: int, gone: Callable[[], str | None]) -> list[Part]:
    """Every rank's note, when all are there.

    `gone` says why there is no use in waiting any longer, if there is none.

    Raises:
        CheckpointError: with that reason and the ranks that are missing.
    """
    parts: dict[int, Part] = {}
    pause = _POLL_SECONDS
    while True:
        for rank in range(world_size):
            if rank not in parts and (part := read_part(directory, rank)) is not None:
                parts[rank] = part
        if len(parts) == world_size:
            return [parts[rank] for rank in range(world_size)]
        if reason := gone():
            missing = [rank for rank in range(world_size) if rank not in parts]
            raise CheckpointError(
                f"{directory}: ranks {missing} have not written their part where this rank sees it: {reason}; the "
                "directory must be one that all ranks share"
            )
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


def build_index(header: Header, layouts: Sequence[tuple[int, Layout]], parts: Sequence[Part]) -> Index:
    """The index of what all ranks have written.

    Raises:
        CheckpointError: if a data file is not as long as its pieces are, or pieces do not make up their tensors.
    """
    chunks, ends = _described_chunks(layouts, len(parts))
    looks = {layout.path: (layout.dtype, layout.shape) for _, layout in layouts}
    objects: dict[str, ObjectEntry] = {}
    empties: dict[LeafPath, None] = {}
    order: dict[LeafPath, None] = {}
    seen: set[tuple[LeafPath, tuple[int, ...]]] = set()
    for rank, part in enumerate(parts):
        starts, end = places(part.told, ends[rank])
        if end + sum(length for _, _, length in part.objects) != part.nbytes:
            raise CheckpointError(
                f"rank {rank} wrote {part.nbytes} bytes, but its tensors and objects take {end} and "
                f"{part.nbytes - end}: the ranks do not agree on the state that they save"
            )
        for piece, start in zip(part.told, starts, strict=True):
            look = looks.setdefault(piece.path, (piece.dtype, piece.shape))
            if look != (piece.dtype, piece.shape):
                raise CheckpointError(
                    f"{name_of(piece.path)}: rank {rank} has {piece.shape} of {piece.dtype}, another rank {look[1]} "
                    f"of {look[0]}; the state must be the same on all ranks"
                )
            if (piece.path, piece.offsets) not in seen:  # else a replica that only its holders knew of
                seen.add((piece.path, piece.offsets))
                chunks.setdefault(piece.path, []).append(_chunk(piece, start, data_file(rank)))
        for path, offset, length in part.objects:
            objects[name_of(path)] = ObjectEntry(path, data_file(rank), offset, length)
        empties.update(dict.fromkeys(part.empties))
        order.update(dict.fromkeys(part.order))
    tensors = [TensorEntry(path, *looks[path], tuple(found)) for path, found in chunks.items()]
    files = [File(data_file(rank), part.nbytes, part.blocks) for rank, part in enumerate(parts) if part.nbytes]
    return Index(
        {entry.name: entry for entry in tensors},
        objects,
        {file.name: file for file in files},
        tuple(empties),
        header.step,
        header.world_size,
        header.info,
        tuple(order),
    )


def _described_chunks(
    layouts: Iterable[tuple[int, Layout]], world_size: int
) -> tuple[dict[LeafPath, list[Chunk]], list[int]]:
    """The chunks of tensors that layouts describe, and where they end in each rank's file.

    Runs once for each rank and tensor, with the interpreter that the training needs.
    """
    files, ends = [data_file(rank) for rank in range(world_size)], [0] * world_size
    chunks: dict[LeafPath, list[Chunk]] = {}
    for number, layout in layouts:
        found = chunks[layout.path] = []
        for rank, offsets, sizes in layout.boxes(number):
            archive = archive_of(layout.dtype, sizes)
            start, length = archive.place(ends[rank]), archive.length
            ends[rank] = start + length
            found.append(Chunk(files[rank], start, length, offsets, sizes, start + len(archive.head)))
    return chunks, ends


def _chunk(piece: Piece, start: int, file: str) -> Chunk:
    archive = archive_of(piece.dtype, piece.sizes)
    return Chunk(file, start, archive.length, piece.offsets, piece.sizes, start + len(archive.head))


def write_index(directory: Path, index: Index, *, sealed: bool = True) -> None:
    """Writes stock's metadata and, last, the manifest into a directory that has all data files, and syncs both.

    Without a seal there is no manifest, and the directory is one as torch.distributed.checkpoint writes it.
    """
    metadata = stock_metadata(index, SAVE_ID if sealed else None)
    blocks = write_file(directory / METADATA, [metadata], lambda _: None)
    if sealed:
        beside = File(METADATA, len(metadata), tuple(blocks))
        manifest = pack(index, datetime.now(UTC).isoformat(timespec="microseconds"), beside)
        write_file(directory / MANIFEST, [manifest], lambda _: None)
