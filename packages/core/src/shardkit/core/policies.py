"""The policies that a user passes in: frozen, validated when built.

The comm interfaces (`Comm`, `AllGather`, `ReduceScatter`) have the call signatures of stock's custom comms. An object
written for `torch.distributed.fsdp` works here unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from shardkit.core.torch_compat import (
    StockCPUOffloadPolicy,
    StockDataParallelMeshDims,
    StockMixedPrecisionPolicy,
    StockOffloadPolicy,
)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which the modules of one `fully_shard` call compute, communicate and return.

    Complex and integer parameters keep their dtype, and so do gradients of complex ones.

    Attributes:
        param_dtype: dtype of the unsharded parameters, and so of the all-gather, forward and backward. None keeps the
            original dtype. Sharded parameters, and so the optimizer, always keep the original dtype.
        reduce_dtype: dtype in which gradients are summed, and in which they accumulate while gradient sync is off. None
            follows the installed torch's FSDP2. From torch 2.15 on it is the parameter's `grad_dtype` if set, else its
            original dtype; a group with several such dtypes uses the dtype that holds them all. Before 2.15 it is the
            `grad_dtype` if that differs from the parameter's dtype, else the dtype of the gradient.
        output_dtype: dtype to which floating-point outputs of the module's forward are cast. None does not cast.
        cast_forward_inputs: whether floating-point inputs of the module's forward are cast to `param_dtype`.
        param_dtype_override_fn: called once with each parameter when it is sharded, with the same result on all ranks.
            Returning the parameter's own dtype keeps the parameter in it; `param_dtype` or None changes nothing. Inputs
            are cast to `param_dtype` in either case.
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
                raise ValueError(
                    f"MixedPrecisionPolicy.{name} must be a floating-point dtype or None, got {dtype!r}; pass a dtype "
                    "such as torch.bfloat16"
                )

    def for_parameter(self, parameter: nn.Parameter, fqn: str) -> MixedPrecisionPolicy:
        """The policy of one parameter: this one, or one with the dtype that `param_dtype_override_fn` returns."""
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
        pin_memory: whether that memory is page-locked, so that copies can overlap with computation. It has no effect on
            a CPU mesh, where nothing is copied.
        budget: bytes of shards that one `fully_shard` call may leave on each rank's device, 0 or more. The largest
            parameters are offloaded until the others fit. Gradients and optimizer states of these come on top. None
            offloads all.
    """

    pin_memory: bool = True
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and (not isinstance(self.budget, int) or self.budget < 0):
            raise ValueError(f"CPUOffloadPolicy.budget is {self.budget!r}; pass a number of bytes from 0 on, or None")


OffloadChoice: TypeAlias = OffloadPolicy | Mapping[str, OffloadPolicy]
"""One policy for all parameters of a call, or policies by patterns of their names, as in `fnmatch`."""


@dataclass(frozen=True)
class CompressionPolicy:
    """How one `fully_shard` call's parameters and gradients are rounded so that fewer bytes are sent.

    Parameters with fewer than two dims (norms, biases, scalars) and tensors that are no wider than their compressed
    form are sent unchanged. bf16 gradients that are summed in fp32 are sent as bf16 with any `reduce`, which rounds
    nothing; without a policy NCCL casts them to fp32 first. Ranks that share memory send nothing to each other, so
    nothing is compressed there. The all-reduce of HSDP is not compressed. Sharded parameters, gradients and the
    optimizer keep their dtypes.

    Attributes:
        gather: "int8", "bf16" or None for full precision. All ranks compute with the same rounded parameters.
        reduce: the same for gradients on the way to their owner, which sums them in fp32 and does not round its own.
        block: number of consecutive elements that share one fp32 scale, the largest magnitude over 127 (int8 only).
    """

    gather: Literal["int8", "bf16"] | None = None
    reduce: Literal["int8", "bf16"] | None = None
    block: int = 256

    def __post_init__(self) -> None:
        for name in ("gather", "reduce"):
            if getattr(self, name) not in ("int8", "bf16", None):
                raise ValueError(
                    f'CompressionPolicy.{name} must be "int8", "bf16" or None, got {getattr(self, name)!r}'
                )
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"CompressionPolicy.block must be a positive number of elements, got {self.block!r}")


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a larger mesh are data parallel, by name; several names are flattened into one axis.

    Attributes:
        shard: axis or axes that parameters are sharded over.
        replicate: axis or axes that parameters are replicated over (HSDP; without `shard`: DDP).
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims needs at least one of shard and replicate, got neither; name one")

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
    raise TypeError(
        f"mp_policy must be a MixedPrecisionPolicy, got {policy!r}; pass "
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16), for example"
    )


def offload_of_each(policy: OffloadChoice, nbytes: Mapping[str, int]) -> dict[str, OffloadPolicy]:
    """The offload policy of each parameter of a call. `nbytes` are the bytes of its shard, by FQN below the module.

    Of a mapping, the first pattern that matches a parameter decides.
    """
    rules = policy if isinstance(policy, Mapping) else {"*": policy}
    chosen: dict[str, OffloadPolicy] = dict.fromkeys(nbytes, OffloadPolicy())
    unnamed = set(nbytes)
    for pattern, rule in rules.items():
        named = [fqn for fqn in nbytes if fnmatchcase(fqn, pattern)]
        if nbytes and not named and isinstance(policy, Mapping):
            raise ValueError(
                f"offload_policy names {pattern!r}, which matches none of this call's parameters: {', '.join(nbytes)}; "
                "use their names below the module of the call, or a pattern such as 'experts.*'"
            )
        offload = as_offload(rule)
        taken = [fqn for fqn in named if fqn in unnamed]
        unnamed.difference_update(taken)
        room = offload.budget if isinstance(offload, CPUOffloadPolicy) else None
        for fqn in sorted(taken, key=nbytes.__getitem__):
            if room is None or (room := room - nbytes[fqn]) < 0:
                chosen[fqn] = offload
    return chosen


def as_offload(policy: OffloadPolicy | StockOffloadPolicy) -> OffloadPolicy:
    """Accepts stock's offload policies beside our own."""
    if isinstance(policy, OffloadPolicy):
        return policy
    if isinstance(policy, StockCPUOffloadPolicy):
        return CPUOffloadPolicy(policy.pin_memory)
    if isinstance(policy, StockOffloadPolicy):
        return OffloadPolicy()
    raise TypeError(
        f"offload_policy must be an OffloadPolicy, got {policy!r}; pass CPUOffloadPolicy() to offload, or a mapping "
        "from names of parameters to policies, or leave it out"
    )


def as_mesh_dims(dims: DataParallelMeshDims | object | None) -> DataParallelMeshDims | None:
    """Accepts stock's `DataParallelMeshDims` beside our own."""
    if dims is None or isinstance(dims, DataParallelMeshDims):
        return dims
    if isinstance(dims, StockDataParallelMeshDims):
        return DataParallelMeshDims(dims.shard, dims.replicate)
    raise TypeError(f"dp_mesh_dims must be a DataParallelMeshDims, got {type(dims).__name__}")


class Comm(ABC):
    """A user's communication primitive: it allocates its buffers and performs the call."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a buffer of that size, dtype and device that the primitive may read or write."""


class AllGather(Comm):
    """All-gathers a flat input of n elements into a flat output of world_size * n elements."""

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
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
