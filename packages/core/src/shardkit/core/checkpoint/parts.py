"""What one rank writes of a checkpoint: its data file, and a note for the rank that commits.

The note (`part-<rank>.json`) appears by a rename when the data file is on disk. It has the checksums of the file, and
what other ranks cannot know of it: objects, plain tensors, boxes that no layout describes. No process group is used, so
nothing here can hang on a rank that is gone, and nothing runs between the ranks while they train.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.core.checkpoint.errors import DamagedCheckpointError
from shardkit.core.checkpoint.index import BLOCK_BYTES
from shardkit.core.checkpoint.leaves import LeafPath
from shardkit.core.checkpoint.manifest import DTYPES, decode_path, dtype_name, encode_path, seal, unseal
from shardkit.core.checkpoint.pieces import Piece
from shardkit.core.checkpoint.verified_file import checksum, read_small

__all__ = ["Part", "data_file", "read_part", "remove_notes", "write_file", "write_part"]


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


def write_part(
    directory: Path,
    rank: int,
    image: memoryview,
    told: Sequence[Piece],
    objects: Sequence[tuple[LeafPath, bytes]],
    empties: Sequence[LeafPath],
    order: Sequence[LeafPath],
    progress: Callable[[int], object],
) -> None:
    """Writes this rank's data file and then its note into a directory that is there. Raises OSError."""
    placed, end = [], len(image)
    for path, data in objects:
        placed.append((path, end, len(data)))
        end += len(data)
    blocks = write_file(directory / data_file(rank), [image, *(data for _, data in objects)], progress) if end else []
    document = {
        "nbytes": end,
        "blocks": blocks,
        "told": [[encode_path(p.path), dtype_name(p.dtype), p.shape, p.offsets, p.sizes] for p in told],
        "objects": [[encode_path(path), offset, length] for path, offset, length in placed],
        "empties": [encode_path(path) for path in empties],
        "order": [encode_path(path) for path in order],
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
