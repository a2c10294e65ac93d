"""Tensor subclasses with all-gather hooks of their own, in torchao's manner."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

_aten = torch.ops.aten


# torchao's weight wrappers keep their class through these operators; all others see the plain tensor inside.
_PRESERVED = {
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
    _aten.clone.default,
    _aten.detach.default,
}


class WireWeight(Tensor):
    """A float32 weight that chooses the form of its shards on the wire; subclasses define it."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "WireWeight":
        facts = {name: getattr(inner, name) for name in ("dtype", "layout", "device", "requires_grad")}
        places = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, inner.size(), **places, **facts)

    def __init__(self, inner: Tensor) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> "WireWeight":
        return cls(inner["_inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inner_args, inner_kwargs = pytree.tree_map_only(WireWeight, lambda x: x._inner, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        if func is _aten.copy_.default:
            return args[0]
        if func not in _PRESERVED:
            return out
        out = pytree.tree_map_only(Tensor, cls, out)
        return return_and_correct_aliasing(func, args, kwargs, out) if func is _aten.detach.default else out


class BFloat16OnTheWire(WireWeight):
    """The 1-argument form. Half the bytes; the unsharded weight is plain, over the gathered memory itself."""

    calls: ClassVar[list[DeviceMesh]] = []

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        self.calls.append(mesh)
        return (self._inner.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        (data,) = gathered
        if out is not None:
            assert out.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
            return None
        return data, (data,)


class SameOnTheWire(WireWeight):
    """The unsharded weight is of the class of the shards, so its inner tensor has the name that theirs has."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        return (self._inner,), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        return None if out is not None else (SameOnTheWire(gathered[0]), gathered)
