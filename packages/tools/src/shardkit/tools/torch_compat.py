"""Every name of torch that is private, or that its versions spell differently; checked on torch 2.13.

The rest of the package uses torch's public names, and what `shardkit.core.torch_compat` has already.
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

# What C++ runs to ask a fake tensor for its device, more often than anything else.
ASK_DEVICE: Any = torch.ops.prim.device.default

# What `Tensor.item` runs.
READ_VALUE: Any = torch.ops.aten._local_scalar_dense.default

FakeTensor = fake_tensor.FakeTensor

# What an operator raises that would have to look at the data of a fake tensor.
NEEDS_DATA = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


class FakeTensors:
    """A context in which tensors have shapes, dtypes and storage sizes, but no data.

    torch remembers by weak references which tensor a parameter or constant was made from, and a tensor with such a
    reference cannot be swapped, so that `Module.to(dtype)` fails. Here it remembers by plain ones, until `forget`.
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
        """Drops what is remembered: tensors that nobody else holds are freed."""
        if self._remembered:
            self._remembered.clear()

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator gives here.

        An estimate runs each operator of a block many times on tensors of the same shapes. What torch does for fake
        ones costs a quarter of a millisecond at each call; what came out before is made again in a third of that. See
        `_outcome` for the operators of which that is done.
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
        """Arguments in a form that is equal for calls with the same outcome; their tensors go to `tensors`.

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
    """An argument that a call cannot be recognised by."""


class _Picture(NamedTuple):
    """All that is known of a tensor without data; `memory_of` counts the tensors of a call, None for its own memory."""

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
    """What an operator gives: in `container`, if it is not one thing, tensors, and numbers of tensors of the call."""

    parts: tuple[_Picture | int | None, ...]
    container: type[Any] | None


_RUN = _Outcome((), None)  # it has to be run each time
_OUTCOMES: dict[Any, _Outcome] = {}
_PLAIN_TYPES = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
_RUN_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


def _outcome(function: Any, tensors: list[FakeTensor], out: Any) -> _Outcome:
    """What of an operator's call holds for others like it.

    Only of operators that give tensors, each of which is one of the call's, lies in the memory of one, or has memory of
    its own and no more than it needs.
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
    """Floating-point operations of an operator's call; 0 for one that does no matrix product or convolution."""
    products = _CPU_ATTENTION.get(function)
    if products is not None:
        return _attention_flops(products, args)
    formula: Callable[..., int] | None = flop_registry.get(function._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


# torch counts the attention kernels of GPUs only. Each has (products of queries by keys, index of query, of causal).
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
    """A connection of its own to the store of the default process group, under a prefix, for a thread of its own.

    The group's connection is of no use there: a main thread that waits in it keeps everybody else out.
    """
    return torch.distributed.PrefixStore(prefix, torch.distributed.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]


def forget_meshes() -> None:
    """Drops what DTensor remembers of operators: their results lie on meshes, whose groups may be gone by now."""
    _clear_sharding_prop_cache()
