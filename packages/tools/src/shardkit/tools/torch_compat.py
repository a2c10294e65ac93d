"""All private names of torch in this package, and names that differ between its versions; checked on torch 2.13.

The rest of the package uses torch's public names, and `shardkit.core.torch_compat`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._subclasses import fake_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.flop_counter import flop_registry

# The operator by which C++ asks a fake tensor for its device, more often than any other.
ASK_DEVICE: Any = torch.ops.prim.device.default

# The operator that `Tensor.item` runs.
READ_VALUE: Any = torch.ops.aten._local_scalar_dense.default

FakeTensor = fake_tensor.FakeTensor

# Errors of operators that need the data of a fake tensor.
NEEDS_DATA = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


class FakeTensors:
    """A context in which tensors have shapes, dtypes and storage sizes, but no data.

    torch remembers by weak references which tensor a parameter or constant was made from. A tensor with such a
    reference cannot be swapped, so `Module.to(dtype)` fails. Here the references are strong, until `forget`.
    """

    def __init__(self) -> None:
        self._mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        self._remembered: dict[Any, Any] = {}
        self._mode.fake_tensor_converter.meta_converter.tensor_memo = self._remembered  # type: ignore[assignment]

    def __enter__(self) -> FakeTensors:
        self._mode.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._mode.__exit__(*exc_info)

    @staticmethod
    def real() -> AbstractContextManager[Any]:
        return fake_tensor.unset_fake_temporarily()

    def forget(self) -> None:
        """Drops the remembered tensors; those without other references are freed."""
        if self._remembered:
            self._remembered.clear()

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator on fake tensors.

        An estimate runs each operator of a block many times on tensors of the same shapes. torch's handling of fake
        tensors costs a quarter of a millisecond per call; recreating an earlier result costs a third of that. See
        `_outcome` for the operators that allow it.
        """
        tensors: list[FakeTensor] = []
        try:
            before = self._pictured((args, tuple(kwargs.items())), tensors)
        except _Unknown:
            return function(*args, **kwargs)
        key = (function, torch.get_default_dtype(), before)
        known = _OUTCOMES.get(key)
        if known is None:
            out = function(*args, **kwargs)
            unchanged = self._pictured((args, tuple(kwargs.items())), []) == before
            _OUTCOMES[key] = _outcome(function, tensors, out) if unchanged else _RUN
            return out
        if known is _RUN:
            return function(*args, **kwargs)
        made = [self._made(one, tensors) for one in known.parts]
        return made[0] if known.container is None else known.container(made)

    def _made(self, part: _Picture | int | None, tensors: list[FakeTensor]) -> FakeTensor | None:
        if not isinstance(part, _Picture):
            return None if part is None else tensors[part]
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
            if part.memory_of is not None:
                tensor.set_(tensors[part.memory_of].untyped_storage(), part.offset, part.shape, part.stride)
        return FakeTensor(self._mode, tensor, part.device)

    def _pictured(self, value: Any, tensors: list[FakeTensor]) -> Any:
        """Arguments in a form that is equal for calls with the same outcome; their tensors are added to `tensors`.

        Raises:
            _Unknown: if there is none.
        """
        kind = type(value)
        if kind is FakeTensor:
            plain = not value.dtype.is_complex and not value.is_neg() and value.layout is torch.strided
            if not plain or value.constant is not None or value.fake_mode is not self._mode:
                raise _Unknown
            tensors.append(value)
            return _picture(value, None)
        if kind is tuple or kind is list:
            return tuple([self._pictured(one, tensors) for one in value])
        if kind not in _PLAIN_TYPES:
            raise _Unknown
        return kind, value  # 1, 1.0 and True are equal


class _Unknown(Exception):
    """An argument that cannot be part of a key for calls."""


class _Picture(NamedTuple):
    """Facts about a tensor without data; `memory_of` is an index of the call's tensors, None for own memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    memory_of: int | None


def _picture(tensor: FakeTensor, memory_of: int | None) -> _Picture:
    offset = int(tensor.storage_offset())
    return _Picture(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, tensor.fake_device, memory_of)


class _Outcome(NamedTuple):
    """The result of an operator: tensors and indices of the call's tensors, in `container` if there are several."""

    parts: tuple[_Picture | int | None, ...]
    container: type[Any] | None


_RUN = _Outcome((), None)  # it has to be run each time
_OUTCOMES: dict[Any, _Outcome] = {}
_PLAIN_TYPES = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
_RUN_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


def _outcome(function: Any, tensors: list[FakeTensor], out: Any) -> _Outcome:
    """The outcome of an operator's call that applies to equal calls.

    Only for operators whose results are each one of the call's tensors, a view of one, or a tensor with memory of its
    own and no more than it needs.
    """
    if function.namespace != "aten" or _RUN_TAGS & set(function.tags):
        return _RUN
    container = type(out) if isinstance(out, list | tuple) else None
    parts: list[_Picture | int | None] = []
    memories, fresh = [one.untyped_storage() for one in tensors], list[torch.UntypedStorage]()
    for one in out if container is not None else (out,):
        if one is None:
            parts.append(None)
            continue
        if type(one) is not FakeTensor or one.dtype.is_complex:
            return _RUN
        memory = one.untyped_storage()
        same = next((place for place, tensor in enumerate(tensors) if tensor is one), None)
        shared = next((place for place, other in enumerate(memories) if other is memory), None)
        needed = sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True)) + 1
        dense = not one.storage_offset() and memory.nbytes() == (one.numel() and needed) * one.itemsize
        if same is None and shared is None:
            if function.is_view or not dense or any(memory is other for other in fresh):
                return _RUN
            fresh.append(memory)
        parts.append(_picture(one, shared) if same is None else same)
    return _Outcome(tuple(parts), container)


def join_fake_world(rank: int, world_size: int) -> None:
    """Makes this process `rank` of a default process group whose other ranks do not exist."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - importing it registers the backend

    dist.init_process_group(
        "fake",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
    )


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a functional collective names."""
    resolve: Callable[[str], dist.ProcessGroup] = c10d._resolve_process_group  # type: ignore[assignment, attr-defined]
    return resolve(name)


def count_flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of an operator's call; 0 unless it is a matrix product or convolution."""
    products = _CPU_ATTENTION.get(function)
    if products is not None:
        return _attention_flops(products, args)
    formula: Callable[..., int] | None = flop_registry.get(function._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


# torch only counts the attention kernels of GPUs. Each has (products of queries by keys, index of query, of causal).
_CPU_ATTENTION: dict[Any, tuple[int, int, int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (2, 0, 4),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (5, 1, 7),
}


def _attention_flops(kernel: tuple[int, int, int], args: tuple[Any, ...]) -> int:
    products, query, causal = kernel
    batch, heads, length, width = args[query].shape
    flops: int = products * 2 * batch * heads * length * args[query + 1].shape[2] * width
    return flops // 2 if len(args) > causal and args[causal] else flops


def fake_error_operator(error: BaseException) -> str:
    """The operator that a `NEEDS_DATA` error is about."""
    function = getattr(error, "func", None)
    return str(function) if isinstance(function, torch._ops.OpOverload) else str(error)


def own_store_connection(prefix: str) -> Any:
    """A separate connection to the store of the default process group, under a prefix, for a thread.

    The group's connection cannot be shared: a main thread that waits on it blocks all others.
    """
    return torch.distributed.PrefixStore(prefix, torch.distributed.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]


def forget_meshes() -> None:
    """Drops DTensor's caches of operators: their results lie on meshes whose groups may be gone."""
    _clear_sharding_prop_cache()
