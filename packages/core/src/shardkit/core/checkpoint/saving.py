"""One save of a rank, from staging memory to a complete checkpoint, in a thread beside the training.

Staging memory is the image of a rank's data file, which contains the heads and tails of the archives from the
beginning. A save therefore copies each tensor once. The thread then hashes, writes and syncs large ranges of memory;
all three release the interpreter to the training thread. It is not a daemon thread: a script that ends during a save
waits until the save is on disk. Tensors that lie in files have no copy: the thread reads them, a block at a time, and
the training waits meanwhile.

A rank's note (`part-<rank>.json`) is renamed into place when its data file is on disk. The note has the checksums of
the file and everything that other ranks cannot derive: objects, plain tensors, boxes that no layout describes. Rank 0
reads all notes and writes the index. No process group is used, so nothing here can hang on a dead rank, and ranks
exchange nothing while they train.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.directory import Directory, OtherRuns, writing_in
from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError, damage_of
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
from shardkit.core.checkpoint.location import Location, ObjectPath, names_in, remove_tree, writing_object
from shardkit.core.checkpoint.plan import Layout, Piece, Plan
from shardkit.core.checkpoint.stock_metadata import METADATA, stock_metadata
from shardkit.core.checkpoint.stored import memory_of
from shardkit.core.checkpoint.torch_files import archive_of
from shardkit.core.checkpoint.verified_file import BlockSums, read_small
from shardkit.core.runtime.mapped import briefly_in_memory, file_of
from shardkit.core.torch_compat import foreach_copy_

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.005
_GRACE_SECONDS = 60.0
"""How long the committing rank waits for the others once its own training has ended."""


def chunk_after(end: int, file: str, dtype: torch.dtype, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
    """The next chunk of a data file that is filled up to `end`."""
    archive = archive_of(dtype, sizes)
    start = archive.place(end)
    return Chunk(file, start, archive.length, offsets, sizes, start + len(archive.head))


def chunks_after(end: int, file: str, pieces: Iterable[Piece]) -> tuple[list[Chunk], int]:
    """The chunks of pieces, one after the other, and where the last one ends."""
    chunks = []
    for piece in pieces:
        chunks.append(chunk_after(end, file, piece.dtype, piece.offsets, piece.sizes))
        end = chunks[-1].offset + chunks[-1].length
    return chunks, end


class Image:
    """The data file of `pieces`; its memory is reused by later saves.

    Attributes:
        pieces: the pieces that it has room for, in order.
        parts: the bytes of the file.
    """

    is_live = False
    """Whether the values must not change until they are written."""

    def __init__(self, pieces: Sequence[Piece], *, pinned: bool) -> None:
        self.pieces = tuple(pieces)
        self.pinned = pinned
        chunks, end = chunks_after(0, "", pieces)
        self.memory = torch.zeros(end, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.parts = [memory_of(self.memory)]
        self._views: list[torch.Tensor] = []
        for piece, chunk in zip(pieces, chunks, strict=True):
            archive = archive_of(piece.dtype, piece.sizes)
            values = chunk.offset + len(archive.head)
            self._write(chunk.offset, archive.head)
            self._write(values + archive.nbytes, archive.tail)
            view = self.memory[values : values + archive.nbytes].view(piece.dtype).view(piece.sizes)
            self._views.append(view)

    def _write(self, at: int, data: bytes) -> None:
        if data:  # the archive of a tensor without elements is only a head
            self.memory[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @torch.no_grad()
    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Copies in the values of the pieces. They may change again when it returns."""
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


class LiveImage:
    """The data file of `pieces` as an `Image`, whose values are not copied if they lie in files."""

    is_live = True
    pinned = False

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self.parts: list[bytes | memoryview] = []

    @torch.no_grad()
    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Takes the values of the pieces."""
        chunks, _ = chunks_after(0, "", self.pieces)
        self.parts, end = [], 0
        for piece, chunk, value in zip(self.pieces, chunks, values, strict=True):
            if file_of(value) is None or not value.is_contiguous():
                value = torch.empty(piece.sizes, dtype=piece.dtype, device="cpu").copy_(value)
            archive = archive_of(piece.dtype, piece.sizes)
            self.parts += [bytes(chunk.offset - end), archive.head, memory_of(value).toreadonly(), archive.tail]
            end = chunk.offset + chunk.length


@dataclass(frozen=True)
class Part:
    """A rank's note."""

    nbytes: int  # nbytes, blocks: size and checksums of its data file; no blocks if it wrote none
    blocks: tuple[str, ...]
    told: tuple[Piece, ...]  # pieces after those that layouts describe, in order
    objects: tuple[tuple[LeafPath, int, int], ...]  # path, offset and length of each object
    empties: tuple[LeafPath, ...]  # paths of empty mappings
    order: tuple[LeafPath, ...] = ()  # of the leaves in the note, if it is not tensors first


def data_file(rank: int) -> str:
    """The name of a rank's data file; the same as stock's."""
    return f"__{rank}_0.distcp"


def _note(rank: int) -> str:
    return f"part-{rank}.json"


@contextmanager
def _writing(path: Location) -> Iterator[Callable[[memoryview], int]]:
    """Yields a function that writes some bytes of a new file, which is on disk at the end of the block."""
    if isinstance(path, ObjectPath):
        with writing_object(path) as write:
            yield write
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        yield lambda data: os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _blocks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Blocks of all parts, each of which is in memory until the next one is taken."""
    for data in parts:
        part = memoryview(data)
        for at in range(0, len(part), BLOCK_BYTES):
            with briefly_in_memory(part[at : at + BLOCK_BYTES]):
                yield part[at : at + BLOCK_BYTES]


def write_file(path: Location, parts: Sequence[bytes | memoryview], progress: Callable[[int], object]) -> File:
    """Writes parts one after the other and syncs them to disk, while a second thread hashes them.

    Hashing, writing and syncing leave the interpreter to other threads. Raises OSError, and what hashing raises.
    """
    sums = BlockSums()
    failed: list[BaseException] = []

    def hash_parts() -> None:
        try:
            for block in _blocks(parts):
                sums.add(block)
        except BaseException as error:  # noqa: BLE001 (raised below: what was not hashed is not saved)
            failed.append(error)

    hashing = threading.Thread(target=hash_parts, name=f"hash-{path.name}")
    try:
        with _writing(path) as write:
            try:
                hashing.start()
            except RuntimeError:  # no room for a thread, or the interpreter ends
                hash_parts()
            for block in _blocks(parts):
                done = 0
                while done < len(block):
                    done += write(block[done:])
                progress(len(block))
    finally:
        if hashing.ident is not None:
            hashing.join()
    if failed:
        raise failed[0]
    return File(path.name, sums.nbytes, sums.finish())


def write_part(
    directory: Location,
    rank: int,
    image: Sequence[bytes | memoryview],
    plan: Plan,
    progress: Callable[[int], object],
    before_note: Callable[[], object] = lambda: None,
) -> None:
    """Writes this rank's data file and then its note into an existing directory. Raises OSError."""
    placed, end = [], sum(map(len, image))
    for path, data in plan.objects:
        placed.append((path, end, len(data)))
        end += len(data)
    contents: list[bytes | memoryview] = [*image, *(data for _, data in plan.objects)]
    document = {
        "nbytes": end,
        "blocks": write_file(directory / data_file(rank), contents, progress).blocks if end else [],
        "told": [[encode_path(p.path), dtype_name(p.dtype), p.shape, p.offsets, p.sizes] for p in plan.told],
        "objects": [[encode_path(path), offset, length] for path, offset, length in placed],
        "empties": [encode_path(path) for path in plan.empties],
        "order": [encode_path(path) for path in plan.order],
    }
    before_note()
    if isinstance(directory, ObjectPath):
        with writing_object(directory / _note(rank)) as write:
            write(seal(document))
        return
    temporary = directory / f"{_note(rank)}.tmp"
    temporary.write_bytes(seal(document))
    temporary.rename(directory / _note(rank))


def read_part(directory: Location, rank: int) -> Part | None:
    """A rank's note, None if it has not left one yet. Raises DamagedCheckpointError if it is damaged."""
    path = directory / _note(rank)
    if not path.exists():
        return None
    found: dict[str, Any] = unseal(read_small(directory, path.name), str(path))
    with damage_of(str(path), "is not put together as a note of a rank"):
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


@dataclass(frozen=True)
class Header:
    """The metadata of a checkpoint besides its state."""

    step: int
    world_size: int
    info: dict[str, Any]


def await_parts(directory: Location, world_size: int, gone: Callable[[], str | None]) -> list[Part]:
    """Every rank's note, when all exist.

    `gone` returns a reason to stop waiting, or None. Raises CheckpointError with that reason and the missing ranks.
    """
    parts: dict[int, Part] = {}
    pause, longest = _POLL_SECONDS, 0.1 if isinstance(directory, Path) else 1.0  # a store takes money for each look
    while True:
        there = names_in(directory) if isinstance(directory, ObjectPath) else None  # one request, not one a rank
        for rank in range(world_size):
            if rank in parts or (there is not None and _note(rank) not in there):
                continue
            if (part := read_part(directory, rank)) is not None:
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
        pause = min(longest, pause * 1.5)


def build_index(header: Header, layouts: Sequence[tuple[int, Layout]], parts: Sequence[Part]) -> Index:
    """The index of all ranks' data. Raises CheckpointError if a data file is not as long as its pieces, or the pieces
    do not make up their tensors.
    """
    files = [data_file(rank) for rank in range(len(parts))]
    # This runs once for each rank and tensor, with the interpreter that the training needs.
    ends = [0] * len(parts)
    chunks: dict[LeafPath, list[Chunk]] = {}
    for number, layout in layouts:
        found = chunks[layout.path] = []
        for rank, offsets, sizes in layout.boxes(number):
            found.append(chunk_after(ends[rank], files[rank], layout.dtype, offsets, sizes))
            ends[rank] = found[-1].offset + found[-1].length
    looks = {layout.path: (layout.dtype, layout.shape) for _, layout in layouts}
    objects: dict[str, ObjectEntry] = {}
    empties: dict[LeafPath, None] = {}
    order: dict[LeafPath, None] = {}
    seen: set[tuple[LeafPath, tuple[int, ...]]] = set()
    for rank, part in enumerate(parts):
        told, end = chunks_after(ends[rank], files[rank], part.told)
        if end + sum(length for _, _, length in part.objects) != part.nbytes:
            raise CheckpointError(
                f"rank {rank} wrote {part.nbytes} bytes, but its tensors and objects take {end} and "
                f"{part.nbytes - end}: the ranks do not agree on the state that they save; "
                "save the same state on all ranks"
            )
        for piece, chunk in zip(part.told, told, strict=True):
            look = looks.setdefault(piece.path, (piece.dtype, piece.shape))
            if look != (piece.dtype, piece.shape):
                raise CheckpointError(
                    f"{name_of(piece.path)}: rank {rank} has {piece.shape} of {piece.dtype}, another rank {look[1]} "
                    f"of {look[0]}; the state must be the same on all ranks"
                )
            if (piece.path, piece.offsets) not in seen:  # else a replica that only its holders know
                seen.add((piece.path, piece.offsets))
                chunks.setdefault(piece.path, []).append(chunk)
        for path, offset, length in part.objects:
            objects[name_of(path)] = ObjectEntry(path, files[rank], offset, length)
        empties.update(dict.fromkeys(part.empties))
        order.update(dict.fromkeys(part.order))
    data = {name: File(name, part.nbytes, part.blocks) for name, part in zip(files, parts, strict=True) if part.nbytes}
    try:
        return Index(
            {name_of(path): TensorEntry(path, *looks[path], tuple(found)) for path, found in chunks.items()},
            objects,
            data,
            tuple(empties),
            header.step,
            header.world_size,
            header.info,
            tuple(order),
        )
    except DamagedCheckpointError as error:
        raise CheckpointError(f"{error}; some ranks lack theirs: give every rank this state, or none") from None


def write_index(
    directory: Location,
    index: Index,
    *,
    sealed: bool = True,
    before_manifest: Callable[[bytes], object] = lambda _: None,
) -> None:
    """Writes stock's metadata, then the manifest, into a directory that has all data files; syncs both.

    Without a seal no manifest is written, and the directory looks like one written by torch.distributed.checkpoint.
    `before_manifest` receives the manifest when only this is still to be written.
    """
    metadata = write_file(directory / METADATA, [stock_metadata(index, SAVE_ID if sealed else None)], lambda _: None)
    if sealed:
        manifest = pack(index, datetime.now(UTC).isoformat(timespec="microseconds"), metadata)
        before_manifest(manifest)
        write_file(directory / MANIFEST, [manifest], lambda _: None)


@dataclass(frozen=True)
class Progress:
    """The progress of a save on this rank; `phase` is "writing", "committing", "done" or "failed"."""

    step: int
    phase: str
    written_bytes: int
    total_bytes: int


class Save:
    """A running save. Nothing here is collective."""

    def __init__(
        self,
        directory: Directory,
        token: str,
        header: Header,
        rank: int,
        plan: Plan,
        image: Image | LiveImage,
        keep: int | None,
        timeout: float,
        others: OtherRuns | None = None,
    ) -> None:
        self._directory, self._token, self._header, self._rank = directory, token, header, rank
        self._plan, self._image, self._keep, self._timeout, self._others = plan, image, keep, timeout, others
        self._temporary = directory.hidden(header.step, token, "incomplete")
        self._total = 0
        self._written = 0
        self._phase = "writing"
        self._began = time.monotonic()
        self._ended: float | None = None
        self._abandoned: str | None = None
        self._starter = threading.current_thread()
        self._started = threading.Event()  # `start` has ended
        self._unchanged = not image.is_live  # the values, while the data file was written
        self._data_done = threading.Event()
        self._part_done = threading.Event()
        self._part_error: Exception | None = None
        self._commit_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{header.step}")

    def start(self) -> None:
        """Stages the state and starts to write. An error here fails the save; all ranks learn of it when they wait."""
        try:
            self._image.fill(self._plan.values)
            self._plan.values.clear()  # they may be the last references to these tensors
            self._total = sum(map(len, (*self._image.parts, *(data for _, data in self._plan.objects))))
            self._thread.start()
            if self._image.is_live:
                self._await_data()
        except Exception as error:  # noqa: BLE001 (the other ranks have begun, this one must not raise alone)
            self._fail(error)
        except BaseException as error:
            if self._thread.ident is None:
                self._fail(error)
            elif self._image.is_live:
                self._await_data()  # a step would change what is being written; a second Ctrl-C fails the save
            raise
        finally:
            self._started.set()

    def _await_data(self) -> None:
        self._data_done.wait()
        self._unchanged = True
        if isinstance(self._image, LiveImage):
            self._image.parts = []

    @property
    def step(self) -> int:
        return self._header.step

    @property
    def progress(self) -> Progress:
        return Progress(self.step, self._phase, self._written, self._total)

    def await_part(self) -> Exception | None:
        """Waits until this rank's part is on disk; returns the error if it failed. Then the image may change again."""
        self._started.set()  # if Ctrl-C came just before `start` did so
        self._part_done.wait()
        return self._part_error

    def await_commit(self) -> Exception | None:
        """On the committing rank, waits until the checkpoint is complete; elsewhere acts as `await_part`."""
        self._join()
        return self._part_error or self._commit_error

    def abandon(self, reason: str) -> None:
        """Stops a commit that waits for other ranks, and removes its files, now that no rank writes to them."""
        self._abandoned = reason
        self._join()
        self._remove()

    def _join(self) -> None:
        if self._thread.ident is not None:  # else it was never started
            self._thread.join()

    def _run(self) -> None:
        try:
            with writing_in(self._temporary):
                write_part(self._temporary, self._rank, self._image.parts, self._plan, self._count, self._check)
                self._part_done.set()
                if self._rank == 0:
                    self._phase = "committing"
                    self._commit(self._temporary)
            self._phase = "done"
        except BaseException as error:  # noqa: BLE001 (the training thread raises it, whatever ended this one)
            self._fail(error)

    def _check(self) -> None:
        """Before this rank's note, without which nothing is published.

        Raises:
            CheckpointError: if the training went on while its values were written.
        """
        self._data_done.set()
        while not self._started.wait(1.0) and self._starter.is_alive():
            pass
        if not self._unchanged or self._part_error is not None:
            raise CheckpointError(
                "it was interrupted while state in files was written, which may have changed meanwhile; save again"
            )

    def _fail(self, error: BaseException) -> None:
        _LOG.error("saving step %d to %s failed: %s", self.step, self._directory.path, error)
        if not isinstance(error, Exception):
            error = CheckpointError(f"the thread that writes was ended by {error!r}")
        self._phase = "failed"
        if self._part_done.is_set():
            self._commit_error = error
            self._remove()
        else:
            self._part_error = error  # `abandon` removes the files: other ranks may be writing now
            self._data_done.set()
            self._part_done.set()

    def _remove(self) -> None:
        if self._rank == 0:
            remove_tree(self._temporary)

    def _count(self, nbytes: int) -> None:
        self._written += nbytes

    def _commit(self, temporary: Location) -> None:
        parts = await_parts(temporary, self._header.world_size, self._gone)

        def clear(manifest: bytes) -> None:
            for rank in range(self._header.world_size):  # the manifest contains their notes
                (temporary / _note(rank)).unlink()
            if self._others is not None:
                self._others.make_way(manifest)

        write_index(temporary, build_index(self._header, self._plan.layouts, parts), before_manifest=clear)
        self._directory.publish(temporary, self.step, self._token)
        if self._keep is not None:
            self._directory.retire(self._keep, self.step, self._token)

    def _gone(self) -> str | None:
        """The reason to stop waiting for the other ranks, None to keep waiting."""
        now = time.monotonic()
        if self._abandoned is not None:
            return self._abandoned
        if now - self._began > self._timeout:
            return f"they had {self._timeout:g} s"
        if not threading.main_thread().is_alive():
            self._ended = self._ended or now
            if now - self._ended > _GRACE_SECONDS:
                return f"the training ended {_GRACE_SECONDS:g} s ago on this rank"
        return None
