"""shardkit.legacy_fsdp_compat: the FSDP1 API on shardkit.core, and its checkpoints."""

from typing import NoReturn

from shardkit.core.version import __version__
from shardkit.legacy_fsdp_compat.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from shardkit.legacy_fsdp_compat.fully_sharded_data_parallel import FullyShardedDataParallel
from shardkit.legacy_fsdp_compat.sharded_grad_scaler import ShardedGradScaler

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "__version__",
]


def __getattr__(name: str) -> NoReturn:
    if name in ("FlatParameter", "FlatParamHandle"):
        raise ImportError(
            f"there is no {name} here: parameters stay separate DTensors. Read whole ones inside "
            "FSDP.summon_full_params(module), this rank's rows with parameter.to_local()"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
