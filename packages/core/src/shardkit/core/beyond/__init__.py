"""Training beyond memory: steps that run under the next forward, and optimizer state in files."""

from shardkit.core.beyond.files import FileTier
from shardkit.core.beyond.steps import OverlappedSteps, overlap_step

__all__ = ["FileTier", "OverlappedSteps", "overlap_step"]
