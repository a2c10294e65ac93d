"""Checkpoint directories that someone names, whoever wrote them: which they are, and their index."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from shardkit.core.checkpoint.directory import StoredCheckpoint, read_manifest
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.index import Index
from shardkit.core.checkpoint.leaves import LeafPath
from shardkit.core.checkpoint.manifest import MANIFEST
from shardkit.core.checkpoint.stock_metadata import METADATA, read_stock

__all__ = ["candidates", "open_index"]


def open_index(path: Path, left_out: Callable[[LeafPath], bool] = lambda _: False) -> Index:
    """What a directory holds: by our manifest, or by stock's metadata if there is no manifest.

    What is `left_out` of stock's need not be there.

    Raises:
        CheckpointError: if it is no checkpoint.
        DamagedCheckpointError: if it is a damaged one.
    """
    if (path / MANIFEST).exists():
        return read_manifest(path)
    if (path / METADATA).exists():
        return read_stock(path, left_out)
    raise CheckpointError(f"{path} is no checkpoint: it has neither {MANIFEST} nor {METADATA}")


def candidates(path: Path, *, older: bool) -> list[tuple[Path, Callable[[], Index]]]:
    """What `path` can mean, the newest first, and what gives the index of each.

    A checkpoint and, with `older` and if a run has saved it, those that the run saved before it; of a directory of a
    run, all complete ones. Without `older`, what lies beside a checkpoint is not looked at and need not be readable.
    Whichever they are, they may be damaged: `open_index` and `StoredCheckpoint.read` say what the calls raise.

    Raises:
        CheckpointError: if there is none.
    """
    if any((path / name).exists() for name in (MANIFEST, METADATA)):
        beside = StoredCheckpoint.all_in(path.absolute().parent) if older else []
        steps = [one.step for one in beside if one.path == path.absolute()]
        before = [one for one in beside if steps and one.step < steps[0]]
        return [(path, partial(open_index, path)), *((one.path, one.read) for one in reversed(before))]
    found = StoredCheckpoint.all_in(path)
    if not found:
        raise CheckpointError(f"{path} is no checkpoint, and there is none in it")
    return [(one.path, one.read) for one in reversed(found)]
