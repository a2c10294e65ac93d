"""`fully_shard` of several modules in a row."""

from typing import Any

from torch import nn

import shardkit.core


def shard_each(*modules: Any, api: Any = shardkit.core, **options: Any) -> Any:
    """Shard each module in turn, with the same options, and return the last one, which is usually the root."""
    for module in modules:
        api.fully_shard(module, **options)
    return modules[-1]


def shard_children(model: nn.Module, api: Any = shardkit.core, **options: Any) -> Any:
    """Shard each child, then the model itself."""
    return shard_each(*model.children(), model, api=api, **options)
