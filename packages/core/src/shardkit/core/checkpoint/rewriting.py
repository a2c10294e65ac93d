"""Checkpoints written offline, by one process: as many data files as ranks would write, filled row by row."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from shardkit.core.checkpoint.archive import archive_of
from shardkit.core.checkpoint.commit import write_index
from shardkit.core.checkpoint.directory import sync_directory
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.index import BLOCK_BYTES, Chunk, File, Index, ObjectEntry, TensorEntry
from shardkit.core.checkpoint.leaves import Path as LeafPath
from shardkit.core.checkpoint.leaves import name_of
from shardkit.core.checkpoint.memory import memory_of
from shardkit.core.checkpoint.parts import data_file
from shardkit.core.checkpoint.stored import StoredTensor
from shardkit.core.checkpoint.verified_file import DIGEST_BYTES

__all__ = ["FileWriter", "write_checkpoint"]


class FileWriter:
    """Writes a file from beginning to end; knows the checksums of its blocks when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._hash, self._in_block = hashlib.sha256(), 0
        self.blocks: list[str] = []
        self.at = 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends."""
        view, done = memoryview(data), 0
        while done < len(view):
            part = view[done : done + BLOCK_BYTES - self._in_block]
            self._hash.update(part)
            self._in_block += len(part)
            done += len(part)
            if self._in_block == BLOCK_BYTES:
                self._end_block()
        self._file.write(view)
        self.at += len(view)

    def _end_block(self) -> None:
        self.blocks.append(self._hash.digest()[:DIGEST_BYTES].hex())
        self._hash, self._in_block = hashlib.sha256(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._in_block:
            self._end_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def write_checkpoint(
    target: Path, tensors: Sequence[StoredTensor], objects: Mapping[LeafPath, bytes], about: Index, ranks: int
) -> None:
    """Writes a checkpoint whose tensors are cut by rows into `ranks` files, as `fully_shard` cuts them.

    At most a slab of a tensor is in memory. The target appears when everything is on disk.

    Args:
        target: must not exist.
        tensors: by slabs, verified by whoever reads them.
        objects: bytes of torch.save, by path.
        about: whose step, world size, info and empty mappings to take.
        ranks: number of data files.

    Raises:
        CheckpointError: if the target exists.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists; it would be overwritten: remove it, or choose another place")
    partial = target.with_name(f".{target.name}.{os.getpid()}.incomplete")
    partial.mkdir(parents=True)
    try:
        index = _write_files(partial, tensors, objects, ranks)
        write_index(
            partial,
            replace(
                index,
                step=about.step,
                world_size=about.world_size,
                info=about.info,
                empties=about.empties,
                order=about.order,
            ),
        )
        sync_directory(partial)
        partial.rename(target)
        sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_files(
    directory: Path, tensors: Sequence[StoredTensor], objects: Mapping[LeafPath, bytes], ranks: int
) -> Index:
    chunks: dict[str, list[Chunk]] = {one.name: [] for one in tensors}
    placed: dict[str, ObjectEntry] = {}
    files: dict[str, File] = {}
    for rank in range(ranks):
        name = data_file(rank)
        with FileWriter(directory / name) as file:
            for one in tensors:
                rows = -(-one.rows // ranks)
                first, stop = min(rank * rows, one.rows), min((rank + 1) * rows, one.rows)
                if first < stop:
                    chunks[one.name].append(_write_rows(file, name, one, first, stop))
            for path, data in objects.items() if rank == 0 else ():
                placed[name_of(path)] = ObjectEntry(path, name, file.at, len(data))
                file.write(data)
        files[name] = File(name, file.at, tuple(file.blocks))
    entries = {one.name: TensorEntry(one.path, one.dtype, one.shape, tuple(chunks[one.name])) for one in tensors}
    return Index(entries, placed, files)


def _write_rows(file: FileWriter, name: str, one: StoredTensor, first: int, stop: int) -> Chunk:
    sizes = (stop - first, *one.shape[1:]) if one.shape else ()
    offsets = (first, *[0] * (len(one.shape) - 1)) if one.shape else ()
    archive = archive_of(one.dtype, sizes)
    start = archive.place(file.at)
    file.write(bytes(start - file.at))
    file.write(archive.head)
    for slab in one.slabs(first, stop):
        file.write(memory_of(slab))
    file.write(archive.tail)
    return Chunk(name, start, archive.length, offsets, sizes, start + len(archive.head))
