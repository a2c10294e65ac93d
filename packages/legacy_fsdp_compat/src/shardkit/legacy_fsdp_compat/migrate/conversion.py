"""Converts FSDP1's checkpoints into each format that there is."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shardkit.core.checkpoint import conversion
from shardkit.core.checkpoint.conversion import REPORT, Converted, Writer, refuse_existing
from shardkit.core.checkpoint.dcp_writer import DcpWriter, objects_for_stock
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.safetensors_files import SafetensorsWriter
from shardkit.core.checkpoint.stored import Checkpoint
from shardkit.core.checkpoint.torch_writer import TorchWriter
from shardkit.legacy_fsdp_compat.migrate.local_writer import LocalRanks, LocalWriter
from shardkit.legacy_fsdp_compat.migrate.sharded_files import Ranks, ShardedWriter
from shardkit.legacy_fsdp_compat.migrate.sources import open_checkpoint

__all__ = ["FORMATS", "LOCAL", "REPORT", "SHARDED", "Migration", "convert", "refuse_existing"]

Migration = Converted

FORMATS: dict[str, Callable[[Path, Checkpoint], Writer]] = {
    "dcp": lambda directory, checkpoint: DcpWriter(directory, checkpoint, objects_for_stock(checkpoint)),
    "safetensors": SafetensorsWriter,
    "full": TorchWriter,
}
"""What can be written: a torch.distributed.checkpoint directory, a safetensors file, a file of torch.save. For files of
single ranks see `convert`."""

SHARDED, LOCAL = "sharded", "local"


def convert(
    checkpoint: Checkpoint,
    target: str | Path,
    to: str,
    *,
    ranks: Ranks | LocalRanks | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> Converted:
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
    shapes = ranks.wrapping.known.given if isinstance(ranks, LocalRanks) else None
    make = _writer_for(to, ranks)
    return conversion.convert(
        checkpoint,
        Path(target),
        lambda directory: make(directory, checkpoint),
        f"{to} for {_described(ranks)}",
        read_back=lambda directory: open_checkpoint(directory, shapes),
        report=to,
        durable=False,  # what was lost with the power is made anew from the source
        progress=progress,
    )


def _writer_for(to: str, ranks: Ranks | LocalRanks | None) -> Callable[[Path, Checkpoint], Writer]:
    if to in FORMATS and ranks is None:
        return FORMATS[to]
    if to == SHARDED and isinstance(ranks, Ranks):
        return partial(ShardedWriter, ranks=ranks)
    if to == LOCAL and isinstance(ranks, LocalRanks):
        return partial(LocalWriter, ranks=ranks)
    raise CheckpointError(
        f"unknown format '{to}' for {type(ranks).__name__}, expected one of {', '.join(FORMATS)}, '{SHARDED}' with "
        f"Ranks to write it for, or '{LOCAL}' with LocalRanks"
    )


def _described(ranks: Ranks | LocalRanks | None) -> str:
    """Tells what an attempt was for from what another one is."""
    if isinstance(ranks, LocalRanks):
        return f"{ranks.count} of {json.dumps(ranks.wrapping.as_config())}"
    return f"{ranks.count} of {sorted(ranks.parameters)}" if ranks is not None else "one"
