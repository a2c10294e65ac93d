"""Every name of torch that is private, or that its versions spell differently; checked on torch 2.13.

The rest of the package uses torch's public names, and what `shardkit.core.torch_compat` has already.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils.flop_counter import flop_registry

__all__ = [
    "FakeTensor",
    "NEEDS_DATA",
    "count_flops",
    "fake_tensors",
    "group_named",
    "join_fake_world",
    "operator_of",
]

# What an operator raises that would have to look at the data of a fake tensor.
NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


def fake_tensors() -> AbstractContextManager[Any]:
    """A context in which tensors have shapes, dtypes and storage sizes, but no data."""
    return FakeTensorMode()


def join_fake_world(rank: int, world_size: int) -> None:
    """Makes this process `rank` of a default process group whose other ranks do not exist."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - importing it registers the backend

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a functional collective names."""
    return dist.distributed_c10d._resolve_process_group(name)


def operator_of(function: Any) -> Any:
    """The operator that an overload belongs to (`aten.mm` of `aten.mm.default`)."""
    return function._overloadpacket


def count_flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """Floating-point operations of an operator's call, None for one that does no matrix product or convolution."""
    formula: Callable[..., int] | None = flop_registry.get(operator_of(function))
    if formula is None:
        return None
    return int(formula(*args, **kwargs, out_val=out))


def is_view(function: Any) -> bool:
    """Whether an overload only makes other tensors over the same memory."""
    return bool(function.is_view)


def fake_error_operator(error: BaseException) -> str:
    """The operator that a `NEEDS_DATA` error is about."""
    function = getattr(error, "func", None)
    return str(function) if isinstance(function, torch._ops.OpOverload) else str(error)
