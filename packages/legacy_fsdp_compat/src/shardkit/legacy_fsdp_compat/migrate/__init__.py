"""Moves FSDP1 checkpoints offline: on one machine, without a process group, in a bounded amount of memory."""

from shardkit.legacy_fsdp_compat.migrate.conversion import Migration, convert
from shardkit.legacy_fsdp_compat.migrate.sharded_files import Ranks, parameters_in_groups
from shardkit.legacy_fsdp_compat.migrate.sources import open_checkpoint, shapes_of_file, shapes_of_model
from shardkit.legacy_fsdp_compat.migrate.stored import Checkpoint, CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Migration",
    "Ranks",
    "convert",
    "open_checkpoint",
    "parameters_in_groups",
    "shapes_of_file",
    "shapes_of_model",
]
