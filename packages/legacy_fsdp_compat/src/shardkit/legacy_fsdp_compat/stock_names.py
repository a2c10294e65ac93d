"""The names of stock FSDP1 that `shardkit.core.install(fsdp1=True)` replaces, and our objects for them.

Core finds this through the entry point `fsdp1` of the group `shardkit.stock_names`.
"""

from __future__ import annotations

from typing import Any

from shardkit.legacy_fsdp_compat import api, fully_sharded_data_parallel, sharded_grad_scaler, wrap

__all__ = ["fsdp1_names"]

_PACKAGE = "torch.distributed.fsdp"
_NOT_IN_API = {"OptimStateKeyType"}


def fsdp1_names() -> dict[str, dict[str, Any]]:
    """For each module of torch the names to replace in it, with our objects."""
    configurations = {name: getattr(api, name) for name in api.__all__}
    package = {"FullyShardedDataParallel": fully_sharded_data_parallel.FullyShardedDataParallel, **configurations}
    return {
        _PACKAGE: package,
        f"{_PACKAGE}.fully_sharded_data_parallel": package,
        f"{_PACKAGE}.api": {name: value for name, value in configurations.items() if name not in _NOT_IN_API},
        f"{_PACKAGE}.wrap": {name: getattr(wrap, name) for name in wrap.__all__ if name != "Policy"},
        f"{_PACKAGE}.sharded_grad_scaler": {"ShardedGradScaler": sharded_grad_scaler.ShardedGradScaler},
    }
