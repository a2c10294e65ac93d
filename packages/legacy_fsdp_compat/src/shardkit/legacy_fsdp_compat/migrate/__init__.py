"""Moves FSDP1 checkpoints offline: on one machine, without a process group, in a bounded amount of memory."""

from shardkit.core.checkpoint.conversion import Converted as Migration
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.stored import Checkpoint
from shardkit.legacy_fsdp_compat.migrate.conversion import convert, open_checkpoint, shapes_of_file
from shardkit.legacy_fsdp_compat.migrate.model_wrapping import shapes_of_model, wrapping_of_model
from shardkit.legacy_fsdp_compat.migrate.rank_writers import LocalRanks, Ranks, parameters_in_groups
from shardkit.legacy_fsdp_compat.migrate.wrapping import Wrapping, wrapping_of_file

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "LocalRanks",
    "Migration",
    "Ranks",
    "Wrapping",
    "convert",
    "open_checkpoint",
    "parameters_in_groups",
    "shapes_of_file",
    "shapes_of_model",
    "wrapping_of_file",
    "wrapping_of_model",
]
