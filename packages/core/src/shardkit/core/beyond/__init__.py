"""Training beyond memory: steps under the next forward, optimizer state in files, activations on the host."""

from shardkit.core.beyond.activations import ActivationOffload, offload_activations
from shardkit.core.beyond.files import FileTier
from shardkit.core.beyond.steps import OverlappedSteps, overlap_step

__all__ = ["ActivationOffload", "FileTier", "OverlappedSteps", "offload_activations", "overlap_step"]
