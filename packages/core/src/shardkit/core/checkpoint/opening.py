"""The index of any checkpoint directory, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.index import Index
from shardkit.core.checkpoint.manifest import MANIFEST, unpack
from shardkit.core.checkpoint.stock_metadata import METADATA, read_stock
from shardkit.core.checkpoint.verified_file import read_small

__all__ = ["open_index"]


def open_index(path: Path) -> Index:
    """What a directory holds: by our manifest, or by stock's metadata if there is no manifest.

    Raises:
        CheckpointError: if it is no checkpoint.
        DamagedCheckpointError: if it is a damaged one.
    """
    if (path / MANIFEST).is_symlink() or (path / MANIFEST).exists():
        return unpack(read_small(path, MANIFEST), str(path / MANIFEST))
    if (path / METADATA).exists():
        return read_stock(path)
    raise CheckpointError(f"{path} is no checkpoint: it has neither {MANIFEST} nor {METADATA}")
