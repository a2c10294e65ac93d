"""Converts a checkpoint: streamed, resumable, verified, and moved into place only when it is complete.

Until everything is written, and read back if requested, the output lies in `<target>.partial`. A journal beside it has
one line for the source, then one for each tensor that is written. An interrupted conversion resumes from the journal,
unless the system was restarted since: then it is not known which bytes reached the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.core.checkpoint.directory import sync_directory
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of
from shardkit.core.checkpoint.stored import CHUNK_BYTES, Checkpoint, Slab, StoredTensor, memory_of
from shardkit.core.checkpoint.torch_files import trim_heap
from shardkit.core.checkpoint.writers import Writer

REPORT = "migration.json"
_JOURNAL = "journal.jsonl"


@dataclass
class Converted:
    """The result of a conversion."""

    target: Path  # the directory or file
    # sha256 of each tensor's bytes, by name, as read from the source and, if verified, from the output
    hashes: dict[str, str] = field(default_factory=dict)
    resumed: int = 0  # number of tensors that an earlier attempt had written
    nbytes: int = 0  # bytes of all tensors
    verified: bool = False  # whether the output was read back


def convert(
    checkpoint: Checkpoint,
    target: Path,
    make: Callable[[Path], Writer],
    described: str,
    *,
    read_back: Callable[[Path], Checkpoint] | None = None,
    report: str | None = None,
    as_file: bool = False,
    durable: bool = True,
    progress: Callable[[int], object] = lambda _: None,
) -> Converted:
    """Writes `checkpoint` to `target`, slab by slab.

    Args:
        checkpoint: the source; its files are only read.
        target: must not exist; appears when everything is written.
        make: makes the writer for a directory.
        described: distinguishes this attempt from one with other options.
        read_back: opens the output, which is then compared with the source; None to skip this.
        report: the format, for a `migration.json` in the output; None to write none.
        as_file: the target is the file that the writer names, not a directory.
        durable: sync everything to disk before the target appears.
        progress: receives the number of bytes done; bytes read back count again.

    Raises:
        CheckpointError: if the target exists, an earlier attempt had another source, or the output read back differs.
    """
    progress = _trimming(progress)
    refuse_existing(target)
    _check_source(checkpoint, target)
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    _check_own(partial)
    with _alone(partial):
        with _removed_if_refused(partial, only_empty=True):
            writer = make(partial)  # raises for unsupported values before anything is journaled
        journal = _Journal(partial / _JOURNAL, _fingerprint(checkpoint, described))
        done = Converted(target, nbytes=checkpoint.nbytes, verified=read_back is not None)
        with _removed_if_refused(partial), ThreadPoolExecutor(1) as beside:
            _write(checkpoint, journal, writer, done, progress if read_back else lambda n: progress(2 * n))
            synced = beside.submit(_sync, partial) if durable else None
            if read_back is not None:
                _verify(done, checkpoint, writer, read_back(partial), progress)
            if synced is not None:
                synced.result()
        if report is not None:
            _report(partial, done, checkpoint, report)
        (partial / _JOURNAL).unlink()
        (writer.file if as_file else partial).rename(target)
    if as_file:
        partial.rmdir()
    sync_directory(target.absolute().parent)
    return done


def _trimming(progress: Callable[[int], object]) -> Callable[[int], object]:
    """Reports progress, and trims the heap after every CHUNK_BYTES."""
    since = 0

    def report(nbytes: int) -> None:
        nonlocal since
        since += nbytes
        if since >= CHUNK_BYTES:
            since = 0
            trim_heap()
        progress(nbytes)

    return report


def _write(
    checkpoint: Checkpoint, journal: _Journal, writer: Writer, done: Converted, progress: Callable[[int], object]
) -> None:
    writer.begin(journal.records if writer.file.exists() else journal.forget())
    done.resumed = len(journal.records)
    with ThreadPoolExecutor(1) as beside:
        for path, stored in checkpoint.tensors.items():
            name = name_of(path)
            if name not in journal.records:
                digest = hashlib.sha256()
                record = writer.write(path, _hashed(stored, digest, beside, progress))
                journal.add(name, {**record, "sha256": digest.hexdigest()})
            else:
                progress(stored.nbytes)
            done.hashes[name] = journal.records[name]["sha256"]
    writer.finish()


def _sync(directory: Path) -> None:
    """Syncs all files of a directory to disk."""
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def refuse_existing(target: Path) -> None:
    """Raises `CheckpointError` if there is anything at `target`."""
    if target.exists():
        raise CheckpointError(f"{target} exists; it would be overwritten: remove it, or choose another place")


def _hashed(
    stored: StoredTensor, digest: Any, beside: ThreadPoolExecutor, progress: Callable[[int], object]
) -> Iterator[Slab]:
    """The slabs of a tensor. Each is hashed while it is used and the next one is read."""
    hashing: Future[None] | None = None
    for low, high in stored.ranges():
        values = stored.read(low, high)
        if hashing is not None:
            hashing.result()
        hashing = beside.submit(digest.update, memory_of(values))
        yield low, high, values
        progress(values.nbytes)
    if hashing is not None:
        hashing.result()


def _check_own(partial: Path) -> None:
    """Checks who owns the directory: others could have made it in a shared one, to have other files overwritten."""
    seen = partial.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
        raise CheckpointError(f"{partial} is a link, or belongs to another user; remove it, or choose another place")


@contextmanager
def _alone(partial: Path) -> Iterator[None]:
    """Holds a lock on the directory; the system releases it when the process ends in any way."""
    directory = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise CheckpointError(f"another process is writing {partial}; wait for it, or choose another place") from error
    finally:
        os.close(directory)


@contextmanager
def _removed_if_refused(partial: Path, *, only_empty: bool = False) -> Iterator[None]:
    """Keeps an interrupted attempt for resuming, but removes one that was rejected, as it would be rejected again."""
    try:
        yield
    except CheckpointError:
        if not only_empty or not any(partial.iterdir()):
            shutil.rmtree(partial)
        raise


def _check_source(checkpoint: Checkpoint, target: Path) -> None:
    """Checks that each value has a distinct name, and that the target is not inside the source, which is only read."""
    seen: dict[str, LeafPath] = {}
    for path in (*checkpoint.tensors, *checkpoint.objects):
        other = seen.setdefault(name_of(path), path)
        if other != path:
            raise CheckpointError(
                f"both {path} and {other} are called '{name_of(path)}', and one would overwrite the other; rename one"
            )
    for source in (Path(name).resolve() for name in checkpoint.files):
        if target.resolve().is_relative_to(source):
            raise CheckpointError(f"{target} lies in the source {source}; choose a place outside of it")


def _verify(
    done: Converted, checkpoint: Checkpoint, writer: Writer, output: Checkpoint, progress: Callable[[int], object]
) -> None:
    """Compares names, shapes, dtypes, every byte and every object of the output, read as a user would."""
    if output.objects.keys() != checkpoint.objects.keys():
        odd = [name_of(path) for path in output.objects.keys() ^ checkpoint.objects.keys()]
        raise CheckpointError(f"the objects {odd} are in one of source and output only; convert again")
    for path, value in checkpoint.objects.items():
        if repr(output.objects[path]) != repr(writer.kept(value)):
            raise CheckpointError(
                f"'{name_of(path)}' reads back as {output.objects[path]!r:.200}, expected {writer.kept(value)!r:.200}; "
                "convert again"
            )
    written = {name_of(path): stored for path, stored in output.tensors.items()}
    with ThreadPoolExecutor(1) as beside:
        for path, stored in checkpoint.tensors.items():
            name = name_of(path)
            copy = written.get(name)
            if copy is None or (copy.shape, copy.dtype) != (stored.shape, stored.dtype):
                seen = "missing" if copy is None else f"of shape {copy.shape} and {copy.dtype}"
                raise CheckpointError(
                    f"'{name}' is {seen} in the output; expected shape {stored.shape} and {stored.dtype}; convert again"
                )
            digest = hashlib.sha256()
            for _ in _hashed(copy, digest, beside, progress):
                pass
            if digest.hexdigest() != done.hashes[name]:
                raise CheckpointError(
                    f"'{name}' reads back differently: sha256 {digest.hexdigest()}, expected {done.hashes[name]}; "
                    "try again, perhaps on another disk"
                )


def _report(partial: Path, done: Converted, checkpoint: Checkpoint, to: str) -> None:
    report: dict[str, Any] = {
        "format": to,
        "source": {"kind": checkpoint.kind, "files": checkpoint.files, "world_size": checkpoint.world_size},
        "tensors": {
            name_of(path): {
                "shape": list(one.shape),
                "dtype": str(one.dtype),
                "sha256": done.hashes[name_of(path)],
            }
            for path, one in checkpoint.tensors.items()
        },
    }
    if checkpoint.config is not None:
        report["config"] = checkpoint.config
    (partial / REPORT).write_text(json.dumps(report, indent=1))


def _fingerprint(checkpoint: Checkpoint, to: str) -> str:
    """A fingerprint of the source's files, by size and time, and of its tensors."""
    described: list[Any] = [to, checkpoint.kind, sorted(checkpoint.files)]
    described.append([(name_of(path), one.shape, str(one.dtype)) for path, one in checkpoint.tensors.items()])
    for name in sorted({file for one in checkpoint.tensors.values() for file in one.files}):
        found = Path(name).stat()
        described.append([name, found.st_size, found.st_mtime_ns])
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _boot() -> str:
    """Identifies the current boot of the system; a new name each time if the system does not provide one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex()


class _Journal:
    """The journal of an attempt. An incomplete last line, left by an interruption, is ignored."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self._header = {"source": fingerprint, "boot": _boot()}
        self.records: dict[str, Any] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        whole = []
        for line in lines:
            try:
                whole.append(json.loads(line))
            except json.JSONDecodeError:
                break
        header = whole[0] if whole and isinstance(whole[0], dict) else {}
        if whole and header.get("source") != fingerprint:
            raise CheckpointError(
                f"{path.parent} is left from a conversion of another source, or to another format; remove it first"
            )
        if header != self._header:
            whole = []
        try:
            self.records = {str(entry["name"]): {**entry, "sha256": str(entry["sha256"])} for entry in whole[1:]}
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}; remove {path.parent} and start anew") from error
        path.write_text("".join(json.dumps(entry) + "\n" for entry in [self._header, *whole[1:]]))

    def forget(self) -> dict[str, Any]:
        """Starts again without records, because the data file is gone."""
        self.records = {}
        self._path.write_text(json.dumps(self._header) + "\n")
        return self.records

    def add(self, name: str, record: dict[str, Any]) -> None:
        self.records[name] = {"name": name, **record}
        with self._path.open("a") as file:
            file.write(json.dumps(self.records[name]) + "\n")
