"""From the ranks' data files to a checkpoint: the index of all, stock's metadata, the manifest, the rename."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardkit.core.checkpoint.archive import archive_of
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.image import places
from shardkit.core.checkpoint.index import Chunk, File, Index, ObjectEntry, TensorEntry
from shardkit.core.checkpoint.leaves import LeafPath, name_of
from shardkit.core.checkpoint.manifest import MANIFEST, SAVE_ID, pack
from shardkit.core.checkpoint.metadata_pickle import stock_metadata
from shardkit.core.checkpoint.parts import Part, data_file, read_part, write_file
from shardkit.core.checkpoint.pieces import Layout, Piece
from shardkit.core.checkpoint.stock_metadata import METADATA

__all__ = ["Header", "await_parts", "build_index", "write_index"]

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
