"""State of sharded modules on disk and in memory: checkpoints of training runs, full state dicts, files of others."""

from shardkit.core.checkpoint.directory import StoredCheckpoint
from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.full_state import (
    IncompatibleKeys,
    full_state_dict,
    load_full_state_dict,
    save_full_state_dict,
)
from shardkit.core.checkpoint.manager import CheckpointManager, Restored
from shardkit.core.checkpoint.saving import Progress
from shardkit.core.checkpoint.training_state import TrainingState

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "DamagedCheckpointError",
    "IncompatibleKeys",
    "Progress",
    "Restored",
    "StoredCheckpoint",
    "TrainingState",
    "full_state_dict",
    "load_full_state_dict",
    "save_full_state_dict",
]
