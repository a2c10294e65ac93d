"""Reads files of a checkpoint. A byte is used only after its block's checksum has been verified."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Self

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.index import BLOCK_BYTES, File
from shardkit.core.checkpoint.location import Location, ObjectPath, open_object

_DIGEST_BYTES = 16
_HASHING_THREADS = 2
_VERIFIED_AT_ONCE = 8 * BLOCK_BYTES


def hashing_threads() -> Executor:
    """Threads for `VerifiedFile`. One thread hashes at about 2 GB/s, and a file may be read faster."""
    return ThreadPoolExecutor(_HASHING_THREADS, "hash")


def checksum(block: bytes | bytearray | memoryview) -> str:
    """128 bits of SHA-256, in hex."""
    return hashlib.sha256(block).digest()[:_DIGEST_BYTES].hex()


class BlockSums:
    """Computes the checksums of a file's blocks while its bytes arrive."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._sums: list[str] = []
        self._hash = hashlib.sha256()

    def add(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            part = view[: BLOCK_BYTES - self.nbytes % BLOCK_BYTES]
            self._hash.update(part)
            self.nbytes += len(part)
            view = view[len(part) :]
            if self.nbytes % BLOCK_BYTES == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._sums.append(self._hash.digest()[:_DIGEST_BYTES].hex())
        self._hash = hashlib.sha256()

    def finish(self) -> tuple[str, ...]:
        """All checksums; call it after the last byte."""
        if self.nbytes % BLOCK_BYTES:
            self._end_block()
        return tuple(self._sums)


def open_inside(directory: Location, name: str) -> BinaryIO:
    """Opens a regular file directly inside `directory`; links are not followed. Raises DamagedCheckpointError if it is
    missing or not a regular file, CheckpointError if it cannot be opened.
    """
    path = directory / name
    if isinstance(path, ObjectPath):
        try:
            return open_object(path)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{path} is missing") from error
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing") from error
    except OSError as error:
        if path.is_symlink():
            raise DamagedCheckpointError(f"{path} is a link, expected a file; links are not followed") from error
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedCheckpointError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_small(directory: Location, name: str) -> bytes:
    """All bytes of a file; raises as `open_inside`."""
    with open_inside(directory, name) as file:
        return file.read()


class VerifiedFile:
    """Reads ranges of one file. A block that is only partly needed is kept until another one is. `beside` hashes the
    blocks of a range while the next ones are read. Raises DamagedCheckpointError here and in `read_into`, with the path
    and reason: wrong size, wrong checksum, missing.
    """

    def __init__(self, directory: Location, file: File, beside: Executor) -> None:
        self._file, self.path, self._beside = file, directory / file.name, beside
        self.opened = open_inside(directory, file.name)
        self._at, self._block = -1, bytearray(BLOCK_BYTES)
        seen = self.opened.seek(0, os.SEEK_END)
        if seen != file.nbytes:
            self.opened.close()
            raise DamagedCheckpointError(
                f"{self.path} has {seen} bytes, {file.nbytes} were written: it is truncated or another file"
            )

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fills `target` (bytes) from `offset` on."""
        if self._file.blocks is None:  # no checksums to compare, so read without blocks
            self._read(offset, target)
            return
        done = 0
        hashed: list[tuple[int, int, Future[str]]] = []
        while done < len(target):
            number, skip = divmod(offset + done, BLOCK_BYTES)
            size = min(BLOCK_BYTES, self._file.nbytes - number * BLOCK_BYTES)
            take = min(size - skip, len(target) - done)
            assert take > 0, "the index keeps ranges inside the file"
            part = target[done : done + take]
            if take == size:
                self._read(number * BLOCK_BYTES, part)
                hashed.append((number, size, self._hash(part)))
            else:
                if self._at != number:
                    self._at = -1
                    self._fetch(number, memoryview(self._block)[:size])
                    self._at = number
                part[:] = memoryview(self._block)[skip : skip + take]
            done += take
        for number, size, seen in hashed:
            self._compare(number, size, seen.result())

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length)."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def _hash(self, block: memoryview) -> Future[str]:
        try:
            return self._beside.submit(checksum, block)
        except RuntimeError:  # the interpreter is ending, as in atexit functions, or no thread can be started
            done: Future[str] = Future()
            done.set_result(checksum(block))
            return done

    def _fetch(self, number: int, block: memoryview) -> None:
        """Reads a whole block and verifies it."""
        self._read(number * BLOCK_BYTES, block)
        self._compare(number, len(block), checksum(block))

    def _compare(self, number: int, size: int, seen: str) -> None:
        start = number * BLOCK_BYTES
        if self._file.blocks is not None and seen != self._file.blocks[number]:
            raise DamagedCheckpointError(
                f"{self.path} is damaged: bytes {start} to {start + size} do not have the checksum that was written "
                "with them"
            )

    def _read(self, start: int, block: memoryview) -> None:
        seen = 0
        while seen < len(block):
            try:
                count = self._read_some(start + seen, block[seen:])
            except OSError as error:  # for example, the disk fails
                what = f"{self.path} cannot be read from byte {start + seen} on: {error.strerror or error}"
                if isinstance(self.path, ObjectPath):  # the object need not be damaged
                    raise CheckpointError(f"{what}; check the connection to the store, and start again") from error
                raise DamagedCheckpointError(what) from error
            if count == 0:
                raise DamagedCheckpointError(f"{self.path} ends at byte {start + seen}: it was truncated")
            seen += count

    def _read_some(self, start: int, block: memoryview) -> int:
        if isinstance(self.path, Path):
            return os.preadv(self.opened.fileno(), [block], start)
        self.opened.seek(start)
        data = self.opened.read(len(block))
        block[: len(data)] = data
        return len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()


def verify(directory: Location, file: File, progress: Callable[[int], object] = lambda _: None) -> None:
    """Reads a whole file and reports the bytes read; raises as `VerifiedFile`."""
    block = bytearray(_VERIFIED_AT_ONCE)
    with hashing_threads() as beside, VerifiedFile(directory, file, beside) as opened:
        for start in range(0, file.nbytes, len(block)):
            size = min(len(block), file.nbytes - start)
            opened.read_into(start, memoryview(block)[:size])
            progress(size)
