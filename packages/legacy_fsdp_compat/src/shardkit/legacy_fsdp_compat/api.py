"""Arguments of FSDP: the enums and configurations of `torch.distributed.fsdp.api`, with the same names.

Objects of stock's classes are accepted as well (`own` maps them by class and member name), so a script may keep some of
its imports. Nothing of stock is imported for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules import batchnorm

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
# Every public name of FSDP1 except its classes; the package and `fully_sharded_data_parallel` use this list.

_T = TypeVar("_T")

_BATCH_NORMS: tuple[type[nn.Module], ...] = (
    batchnorm.BatchNorm1d,
    batchnorm.BatchNorm2d,
    batchnorm.BatchNorm3d,
    batchnorm.SyncBatchNorm,
    batchnorm.LazyBatchNorm1d,
    batchnorm.LazyBatchNorm2d,
    batchnorm.LazyBatchNorm3d,
)


class ShardingStrategy(Enum):
    """Which tensors are sharded, and when parameters are freed.

    FULL_SHARD shards parameters, gradients and optimizer state and frees parameters after forward. SHARD_GRAD_OP keeps
    them until after backward. NO_SHARD replicates everything, as DDP does. HYBRID_SHARD and _HYBRID_SHARD_ZERO2 are the
    first two within a group of ranks, replicated over such groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()

    @property
    def is_hybrid(self) -> bool:
        """Whether there are two process groups, one for sharding and one for replication."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def frees_after_forward(self) -> bool:
        """Whether a unit below the root frees its parameters between forward and backward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class BackwardPrefetch(Enum):
    """When backward gathers the next unit: before this unit's gradients are computed, or after."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """The dtypes in which a unit computes, reduces and keeps its buffers. Shards always keep the original dtype.

    Attributes:
        param_dtype: dtype of the gathered parameters, and so of forward and backward.
        reduce_dtype: dtype of the gradient reduction; None means `param_dtype`.
        buffer_dtype: dtype of the buffers from the first forward on. State dicts hold the original dtype, except LOCAL.
        keep_low_precision_grads: leave gradients in `param_dtype`, or with NO_SHARD in the dtype of the reduction.
        cast_forward_inputs: cast the inputs of a unit below the root to `param_dtype`.
        cast_root_forward_inputs: cast the inputs of the root to `param_dtype`.
        _module_classes_to_ignore: with an auto-wrap policy, modules of these classes become separate units without
            mixed precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = _BATCH_NORMS


@dataclass
class CPUOffload:
    """Whether sharded parameters and gradients live in host memory; the optimizer then steps there."""

    offload_params: bool = False


class StateDictType(Enum):
    """The kind of `state_dict()` of an FSDP module.

    FULL: whole tensors under their original names. SHARDED: the same names, each rank its rows. LOCAL: for each unit
        the rank's part of one flat tensor, which can be loaded only with the same wrapping and number of ranks.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """Base of the configurations for weights. `offload_to_cpu`: whether values are moved to the CPU."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """`rank0_only`: whether only the first rank of the process group gets the values."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """For LOCAL_STATE_DICT."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """`_use_dtensor`: DTensors instead of ShardedTensors; set by passing `device_mesh` to FSDP."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Base of the configurations for optimizer state. `offload_to_cpu`: whether values are moved to the CPU."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """`rank0_only`: whether only the first rank gets the values."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For LOCAL_STATE_DICT."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """`_use_dtensor`: DTensors instead of ShardedTensors; set by passing `device_mesh` to FSDP."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """A state dict type with both of its configurations."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(Enum):
    """How an optimizer state dict names parameters: by FQN, or by their number in the optimizer."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


def own(kind: type[_T], value: Any, argument: str) -> _T:
    """`value` as an instance of our class `kind` (or its subclass of that name); stock's objects are translated.

    Raises:
        TypeError: for an object of any other class.
    """
    if isinstance(value, kind):
        return value
    name = type(value).__name__
    target = next((cls for cls in (kind, *kind.__subclasses__()) if cls.__name__ == name), None)
    if target is None:
        raise TypeError(f"{argument} must be a {kind.__name__}, got {value!r}")
    if issubclass(target, Enum):
        return cast(_T, target[value.name])
    fields: Any = dataclasses.fields(cast(Any, target))
    return target(**{field.name: getattr(value, field.name) for field in fields})
