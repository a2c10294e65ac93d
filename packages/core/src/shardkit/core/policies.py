"""What a user passes in: frozen, validated when built.

The comm interfaces (`Comm`, `AllGather`, `ReduceScatter`) have the call signatures that stock custom comms have, so an
object written for `torch.distributed.fsdp` works here unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from shardkit.core.torch_compat import (
    StockCPUOffloadPolicy,
    StockDataParallelMeshDims,
    StockMixedPrecisionPolicy,
    StockOffloadPolicy,
)

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "CompressionPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "as_mixed_precision",
    "as_mesh_dims",
    "as_offload",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtypes one `fully_shard` call computes, communicates and returns in.

    Attributes:
        param_dtype: dtype of the unsharded parameters: of the all-gather and of forward and backward. None keeps the
            original dtype. The sharded parameters, and so the optimizer, always keep the original one.
        reduce_dtype: dtype in which gradients are summed, and accumulated while gradient sync is off. None does as
            stock does in the torch that is installed. From torch 2.15 on: the `grad_dtype` of the parameter if it is
            set, else its original dtype; gradients of a group that differ in it are summed in the dtype that holds
            both. Before: the `grad_dtype` if it is another dtype than the parameter's, else that of the gradient.
        output_dtype: floating-point outputs of the module's forward are cast to it. None leaves them alone.
        cast_forward_inputs: whether floating-point inputs of the module's forward are cast to `param_dtype`.
        param_dtype_override_fn: called once with each parameter when it is sharded; returns its own dtype, which keeps
            this parameter in it, or `param_dtype` or None, which change nothing. Alike on all ranks. Inputs are cast to
            `param_dtype` all the same.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"MixedPrecisionPolicy.{name} must be a floating-point dtype or None, got {dtype}")

    def for_parameter(self, parameter: nn.Parameter, fqn: str) -> MixedPrecisionPolicy:
        """The policy of one parameter: this one, or one with the `param_dtype` that `param_dtype_override_fn` gives it.

        Raises:
            ValueError: if that is neither `param_dtype` nor the parameter's own dtype, with the FQN.
        """
        if self.param_dtype_override_fn is None:
            return self
        chosen = self.param_dtype_override_fn(parameter)
        if chosen is not None and chosen not in (self.param_dtype, parameter.dtype):
            raise ValueError(
                f"param_dtype_override_fn returned {chosen!r} for parameter '{fqn}'; expected {parameter.dtype}, which "
                f"keeps the parameter's dtype, or None or {self.param_dtype}, which use param_dtype"
            )
        dtype = chosen if chosen is not None and chosen.is_floating_point else self.param_dtype
        return replace(self, param_dtype=dtype, param_dtype_override_fn=None)


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: the default of `fully_shard`."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer states live in host memory.

    Attributes:
        pin_memory: whether that memory is page-locked, which copies that overlap with compute need. It has no effect
            on a CPU mesh, where there is nothing to copy to.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class CompressionPolicy:
    """How one `fully_shard` call's parameters and gradients are rounded to travel in fewer bytes.

    Parameters with fewer than two dims (norms, biases, scalars) travel as they are, and so does what is no wider than
    its compressed form. bf16 gradients that are summed in fp32 travel as bf16 with any `reduce`, which rounds nothing;
    without a policy NCCL casts them to fp32 first. Between ranks that share memory nothing travels, and nothing is
    compressed. The all-reduce of HSDP is not compressed either. Sharded parameters, gradients and the optimizer keep
    their dtypes.

    Attributes:
        gather: "int8", "bf16" or None for full precision. All ranks compute with the same, rounded, parameters.
        reduce: the same for gradients on their way to their owner, who sums them in fp32; its own are not rounded.
        block: so many consecutive elements share one fp32 scale, the largest magnitude over 127 (int8 only).
        error_feedback: keeps what rounding took from a gradient and adds it to the next one, at the cost of one fp32
            element for each that is sent.
    """

    gather: Literal["int8", "bf16"] | None = None
    reduce: Literal["int8", "bf16"] | None = None
    block: int = 256
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for name in ("gather", "reduce"):
            if getattr(self, name) not in ("int8", "bf16", None):
                raise ValueError(
                    f'CompressionPolicy.{name} must be "int8", "bf16" or None, got {getattr(self, name)!r}'
                )
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"CompressionPolicy.block must be a positive number of elements, got {self.block!r}")
        if self.error_feedback and self.reduce is None:
            raise ValueError(
                "CompressionPolicy.error_feedback feeds back the rounding of gradients, but reduce is None; set reduce"
            )


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a larger mesh are data parallel, by name; several names are flattened into one axis.

    Attributes:
        shard: axis or axes that parameters are sharded over.
        replicate: axis or axes over which they are replicated (HSDP; alone: DDP).
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims needs at least one of shard and replicate, got neither")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The shard axes as a tuple, empty if there are none."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The replicate axes as a tuple, empty if there are none."""
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def as_mixed_precision(policy: MixedPrecisionPolicy | StockMixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Accepts stock's policy object beside our own, so that a script changes only the import of `fully_shard`."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, StockMixedPrecisionPolicy):
        return MixedPrecisionPolicy(
            policy.param_dtype,
            policy.reduce_dtype,
            policy.output_dtype,
            policy.cast_forward_inputs,
            param_dtype_override_fn=getattr(policy, "param_dtype_override_fn", None),  # since torch 2.15
        )
    raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got {type(policy).__name__}")


def as_offload(policy: OffloadPolicy | StockOffloadPolicy) -> OffloadPolicy:
    """Accepts stock's offload policies beside our own."""
    if isinstance(policy, OffloadPolicy):
        return policy
    if isinstance(policy, StockCPUOffloadPolicy):
        return CPUOffloadPolicy(policy.pin_memory)
    if isinstance(policy, StockOffloadPolicy):
        return OffloadPolicy()
    raise TypeError(f"offload_policy must be an OffloadPolicy, got {type(policy).__name__}")


def as_mesh_dims(dims: DataParallelMeshDims | object | None) -> DataParallelMeshDims | None:
    """Accepts stock's `DataParallelMeshDims` beside our own."""
    if dims is None or isinstance(dims, DataParallelMeshDims):
        return dims
    if StockDataParallelMeshDims is not None and isinstance(dims, StockDataParallelMeshDims):
        return DataParallelMeshDims(dims.shard, dims.replicate)
    raise TypeError(f"dp_mesh_dims must be a DataParallelMeshDims, got {type(dims).__name__}")


class Comm(ABC):
    """A user's own communication primitive: where its buffers come from, and the call."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a buffer of that size, dtype and device that the primitive may read or write."""


class AllGather(Comm):
    """All-gathers a flat input of n elements into a flat output of world_size * n elements."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None: ...


class ReduceScatter(Comm):
    """Reduces a flat input of world_size * n elements with `op` and leaves this rank's n elements in the output."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None: ...
