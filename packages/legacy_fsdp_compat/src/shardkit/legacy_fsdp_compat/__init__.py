"""shardkit.legacy_fsdp_compat: the FSDP1 API on shardkit.core, and its checkpoints."""

from typing import NoReturn

from shardkit.core.version import __version__
from shardkit.legacy_fsdp_compat import api
from shardkit.legacy_fsdp_compat.api import *  # noqa: F403
from shardkit.legacy_fsdp_compat.fully_sharded_data_parallel import FullyShardedDataParallel
from shardkit.legacy_fsdp_compat.sharded_grad_scaler import ShardedGradScaler

__all__ = ["FullyShardedDataParallel", "ShardedGradScaler", "__version__"]
__all__ += api.__all__


def __getattr__(name: str) -> NoReturn:
    if name in ("FlatParameter", "FlatParamHandle"):
        raise ImportError(
            f"there is no {name} here: parameters stay separate DTensors. Read whole ones inside "
            "FSDP.summon_full_params(module), this rank's rows with parameter.to_local()"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
