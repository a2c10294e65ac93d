"""What can be wrong with a checkpoint."""

from __future__ import annotations

__all__ = ["CheckpointError", "DamagedCheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used: the message says which, what was seen, and what to do."""


class DamagedCheckpointError(CheckpointError):
    """Files that are not what was written: truncated, changed, missing, or swapped. The message names the file."""
