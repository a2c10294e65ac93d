"""Converts a checkpoint: streamed, resumable, verified, and in place only when it is complete.

The output is a directory. Until everything is written and has been read back it is called `<target>.partial` and holds
a journal: one line for the source, then one for each tensor that is written. An interrupted conversion goes on there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial as partial_of
from pathlib import Path
from typing import Any, Protocol

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import Path as LeafPath
from shardkit.core.checkpoint.leaves import name_of
from shardkit.core.checkpoint.memory import memory_of
from shardkit.core.checkpoint.stored import Checkpoint, StoredTensor
from shardkit.legacy_fsdp_compat.migrate.dcp_files import DcpWriter
from shardkit.legacy_fsdp_compat.migrate.flat_files import SafetensorsWriter, TorchFileWriter
from shardkit.legacy_fsdp_compat.migrate.local_writer import LocalRanks, LocalWriter
from shardkit.legacy_fsdp_compat.migrate.sharded_files import Ranks, ShardedWriter
from shardkit.legacy_fsdp_compat.migrate.sources import open_checkpoint

__all__ = ["FORMATS", "LOCAL", "REPORT", "SHARDED", "Migration", "convert", "refuse_existing"]

REPORT = "migration.json"
_JOURNAL = "journal.jsonl"


class _Writer(Protocol):
    file: Path

    def begin(self, records: dict[str, Any]) -> None: ...

    def write(self, path: LeafPath, slabs: Iterator[tuple[int, int, torch.Tensor]]) -> dict[str, Any]: ...

    def finish(self) -> None: ...

    def kept(self, value: Any) -> Any: ...


FORMATS: dict[str, Callable[[Path, Checkpoint], _Writer]] = {
    "dcp": DcpWriter,
    "safetensors": SafetensorsWriter,
    "full": TorchFileWriter,
}
"""What can be written: a torch.distributed.checkpoint directory, a safetensors file, a file of torch.save. For files of
single ranks see `convert`."""

SHARDED, LOCAL = "sharded", "local"


@dataclass
class Migration:
    """What was done.

    Attributes:
        target: the directory.
        hashes: sha256 of each tensor's bytes, by name, as read from the source and again from the output.
        resumed: how many tensors an earlier attempt had written.
        nbytes: bytes of all tensors.
    """

    target: Path
    hashes: dict[str, str] = field(default_factory=dict)
    resumed: int = 0
    nbytes: int = 0


def convert(
    checkpoint: Checkpoint,
    target: str | Path,
    to: str,
    *,
    ranks: Ranks | LocalRanks | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> Migration:
    """Writes `checkpoint` to the directory `target` in the format `to`, and reads it back.

    Args:
        checkpoint: what `open_checkpoint` returned; its files are only read.
        target: must not exist; appears when everything is written and verified.
        to: a key of `FORMATS`, or "sharded" or "local": a file of torch.save for each rank, as FSDP1's SHARDED or
            LOCAL.
        ranks: with "sharded" and "local", for how many ranks, and what are parameters or how they are wrapped.
        progress: is told how many bytes were done; every tensor counts twice, written and read back.

    Raises:
        CheckpointError: if the target exists, an earlier attempt was of another source, or what was read back differs.
    """
    target = Path(target)
    refuse_existing(target)
    make = _writer_for(to, ranks)
    _check_names(checkpoint)
    _check_place(checkpoint, target)
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    _check_own(partial)
    with _alone(partial):
        described = f"{to} for {_described(ranks)}"
        writer = make(partial, checkpoint)  # raises for what it cannot write, before anything is noted
        journal = _Journal(partial / _JOURNAL, _fingerprint(checkpoint, described))
        return _convert(checkpoint, target, partial, journal, writer, to, progress)


def _writer_for(to: str, ranks: Ranks | LocalRanks | None) -> Callable[[Path, Checkpoint], _Writer]:
    if to in FORMATS and ranks is None:
        return FORMATS[to]
    if to == SHARDED and isinstance(ranks, Ranks):
        return partial_of(ShardedWriter, ranks=ranks)
    if to == LOCAL and isinstance(ranks, LocalRanks):
        return partial_of(LocalWriter, ranks=ranks)
    raise CheckpointError(
        f"unknown format '{to}' for {type(ranks).__name__}, expected one of {', '.join(FORMATS)}, '{SHARDED}' with "
        f"Ranks to write it for, or '{LOCAL}' with LocalRanks"
    )


def _described(ranks: Ranks | LocalRanks | None) -> str:
    """Tells what an attempt was for from what another one is."""
    if isinstance(ranks, LocalRanks):
        return f"{ranks.count} of {json.dumps(ranks.wrapping.as_config())}"
    return f"{ranks.count} of {sorted(ranks.parameters)}" if ranks is not None else "one"


def _convert(
    checkpoint: Checkpoint,
    target: Path,
    partial: Path,
    journal: _Journal,
    writer: _Writer,
    to: str,
    progress: Callable[[int], object],
) -> Migration:
    writer.begin(journal.records if writer.file.exists() else journal.forget())
    migration = Migration(target, resumed=len(journal.records), nbytes=checkpoint.nbytes)
    for path, stored in checkpoint.tensors.items():
        name = name_of(path)
        if name not in journal.records:
            digest = hashlib.sha256()
            record = writer.write(path, _hashed(stored, digest, progress))
            journal.add(name, {**record, "sha256": digest.hexdigest()})
        else:
            progress(stored.nbytes)
        migration.hashes[name] = journal.records[name]["sha256"]
    writer.finish()
    _verify(partial, migration, checkpoint, writer, progress)
    _report(partial, migration, checkpoint, to)
    os.replace(partial, target)  # noqa: PTH105 - atomic on one file system
    return migration


def refuse_existing(target: Path) -> None:
    """Raises `CheckpointError` if there is anything at `target`."""
    if target.exists():
        raise CheckpointError(f"{target} exists; it would be overwritten: remove it, or choose another place")


def _hashed(
    stored: StoredTensor, digest: Any, progress: Callable[[int], object]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    for low, high in stored.ranges():
        values = stored.read(low, high)
        digest.update(memory_of(values))
        yield low, high, values
        progress(values.nbytes)


def _check_place(checkpoint: Checkpoint, target: Path) -> None:
    """The source is only read, also its directory."""
    for source in (Path(name).resolve() for name in checkpoint.files):
        if target.resolve().is_relative_to(source):
            raise CheckpointError(f"{target} lies in the source {source}; choose a place outside of it")


def _check_own(partial: Path) -> None:
    """In a directory that others may write to, they could have made it, to have something else overwritten."""
    seen = partial.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
        raise CheckpointError(f"{partial} is a link, or belongs to another user; remove it, or choose another place")


@contextmanager
def _alone(partial: Path) -> Iterator[None]:
    """Holds a lock on the directory; it goes with the process, however that ends."""
    directory = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise CheckpointError(f"another process is writing {partial}; wait for it, or choose another place") from error
    finally:
        os.close(directory)


def _check_names(checkpoint: Checkpoint) -> None:
    seen: dict[str, LeafPath] = {}
    for path in (*checkpoint.tensors, *checkpoint.objects):
        other = seen.setdefault(name_of(path), path)
        if other != path:
            raise CheckpointError(
                f"both {path} and {other} are called '{name_of(path)}', and one would overwrite the other; rename one"
            )


def _verify(
    partial: Path, migration: Migration, checkpoint: Checkpoint, writer: _Writer, progress: Callable[[int], object]
) -> None:
    """Reads the output as anyone would, and compares names, shapes, dtypes, every byte and every object."""
    output = open_checkpoint(partial, writer.shapes if isinstance(writer, LocalWriter) else None)
    if output.objects.keys() != checkpoint.objects.keys():
        odd = [name_of(path) for path in output.objects.keys() ^ checkpoint.objects.keys()]
        raise CheckpointError(f"the objects {odd} are in one of source and output only")
    for path, value in checkpoint.objects.items():
        if repr(output.objects[path]) != repr(writer.kept(value)):
            raise CheckpointError(
                f"'{name_of(path)}' reads back as {output.objects[path]!r:.200}, expected {writer.kept(value)!r:.200}"
            )
    written = {name_of(path): stored for path, stored in output.tensors.items()}
    for path, stored in checkpoint.tensors.items():
        name = name_of(path)
        copy = written.get(name)
        if copy is None or (copy.shape, copy.dtype) != (stored.shape, stored.dtype):
            seen = "missing" if copy is None else f"of shape {copy.shape} and {copy.dtype}"
            raise CheckpointError(f"'{name}' is {seen} in the output; expected shape {stored.shape} and {stored.dtype}")
        digest = hashlib.sha256()
        for _ in _hashed(copy, digest, progress):
            pass
        if digest.hexdigest() != migration.hashes[name]:
            raise CheckpointError(
                f"'{name}' reads back differently: sha256 {digest.hexdigest()}, expected {migration.hashes[name]}; "
                f"remove {partial} and try again, perhaps on another disk"
            )


def _report(partial: Path, migration: Migration, checkpoint: Checkpoint, to: str) -> None:
    report: dict[str, Any] = {
        "format": to,
        "source": {"kind": checkpoint.kind, "files": checkpoint.files, "world_size": checkpoint.world_size},
        "tensors": {
            name_of(path): {
                "shape": list(one.shape),
                "dtype": str(one.dtype),
                "sha256": migration.hashes[name_of(path)],
            }
            for path, one in checkpoint.tensors.items()
        },
    }
    if checkpoint.config is not None:
        report["config"] = checkpoint.config
    (partial / REPORT).write_text(json.dumps(report, indent=1))
    (partial / _JOURNAL).unlink()


def _fingerprint(checkpoint: Checkpoint, to: str) -> str:
    """Of the source's files, by size and time, and of the tensors in them."""
    described: list[Any] = [to, checkpoint.kind, sorted(checkpoint.files)]
    described.append([(name_of(path), one.shape, str(one.dtype)) for path, one in checkpoint.tensors.items()])
    parts = (part for one in checkpoint.tensors.values() for part in one.parts)
    for name in sorted({file for part in parts for file in (part.file, *part.others)}):
        found = Path(name).stat()
        described.append([name, found.st_size, found.st_mtime_ns])
    return hashlib.sha256(repr(described).encode()).hexdigest()


class _Journal:
    """What an attempt has written. A last line that is not whole, from an interruption, does not count."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self.records: dict[str, Any] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        whole = []
        for line in lines:
            try:
                whole.append(json.loads(line))
            except json.JSONDecodeError:
                break
        if whole and whole[0] != fingerprint:
            raise CheckpointError(
                f"{path.parent} is left from a conversion of another source, or to another format; remove it first"
            )
        try:
            self.records = {str(entry["name"]): {**entry, "sha256": str(entry["sha256"])} for entry in whole[1:]}
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}; remove {path.parent} and start anew") from error
        path.write_text("".join(json.dumps(entry) + "\n" for entry in [fingerprint, *whole[1:]]))

    def forget(self) -> dict[str, Any]:
        """Starts anew: the data file is gone."""
        self.records = {}
        self._path.write_text(json.dumps(self._fingerprint) + "\n")
        return self.records

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Notes a tensor as written."""
        self.records[name] = {"name": name, **record}
        with self._path.open("a") as file:
            file.write(json.dumps(self.records[name]) + "\n")
