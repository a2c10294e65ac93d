"""shardkit.tp_adapter: lets shardkit.core shard parameters that tensor or expert parallelism has made DTensors.

Core finds the adapter when it is installed, without an import. The names here are for fused weights and for
checkpoints.
"""

from shardkit.core.version import __version__
from shardkit.tp_adapter.coverage import CheckedLoadPlanner
from shardkit.tp_adapter.declared import declare_sub_blocks
from shardkit.tp_adapter.fused import FusedColwiseParallel
from shardkit.tp_adapter.logical import logical_state_dict
from shardkit.tp_adapter.sub_blocks import SubBlocks

__all__ = [
    "CheckedLoadPlanner",
    "FusedColwiseParallel",
    "SubBlocks",
    "__version__",
    "declare_sub_blocks",
    "logical_state_dict",
]
