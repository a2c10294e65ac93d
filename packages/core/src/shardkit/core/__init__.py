"""shardkit.core: fully sharded data parallelism for PyTorch on a collective runtime of its own."""

from typing import TYPE_CHECKING, Any

from shardkit.core import events
from shardkit.core.checkpoint import full_state_dict, load_full_state_dict, save_full_state_dict
from shardkit.core.clip import clip_grad_norm_, grad_norm
from shardkit.core.fully_shard import fully_shard
from shardkit.core.install import install, uninstall
from shardkit.core.materialize import materialize
from shardkit.core.metrics import StepMetrics
from shardkit.core.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardkit.core.optimizers import optimizer_step_on_shards
from shardkit.core.parameters.ownership import newton_schulz_flops, placements_for, plan_owners
from shardkit.core.parameters.placements import Blocks, Owned
from shardkit.core.policies import (
    AllGather,
    CompressionPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
)
from shardkit.core.replicas import broadcast_replicas
from shardkit.core.version import __version__

if TYPE_CHECKING:
    from shardkit.core.beyond import FileTier, offload_activations, overlap_step

__all__ = [
    "AllGather",
    "Blocks",
    "CPUOffloadPolicy",
    "CompressionPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FileTier",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Owned",
    "ReduceScatter",
    "StepMetrics",
    "UnshardHandle",
    "__version__",
    "broadcast_replicas",
    "clip_grad_norm_",
    "events",
    "full_state_dict",
    "fully_shard",
    "grad_norm",
    "install",
    "load_full_state_dict",
    "materialize",
    "newton_schulz_flops",
    "offload_activations",
    "optimizer_step_on_shards",
    "overlap_step",
    "placements_for",
    "plan_owners",
    "register_fsdp_forward_method",
    "save_full_state_dict",
    "share_comm_ctx",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Training beyond memory is imported when it is asked for."""
    if name not in ("FileTier", "offload_activations", "overlap_step"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; see its __all__ for those it has")
    from shardkit.core import beyond

    return getattr(beyond, name)
