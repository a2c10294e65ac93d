"""Tensors and optimizer state that a step on another thread writes to: whoever reads them waits for it.

Note [Who waits]
A DTensor has no values but those of its local tensor, and all of torch takes that from one attribute. While a step is
under way its parameters, gradients and state are of a subclass in which this attribute is a property that waits. It
gives the tensors their own class back, so nothing is paid afterwards, and a reader gets the local tensor
itself, with its pointer, storage and version. Attributes without values, such as the shape or
`requires_grad`, do not wait, and `parameter.grad = None` does not.

A local tensor that the user took before `step()` is not covered, nor is anything else over the same memory.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.tensors import tensors_in
from shardkit.core.torch_compat import held_local, replace_local

__all__ = ["WaitingState", "give_back", "make_wait"]

_WAIT = "_shardkit_wait"
"""Attribute: a weak reference to the function that readers call, which holds a model and its optimizer."""


def make_wait(tensors: Iterable[DTensor], wait: Callable[[], None]) -> None:
    """Makes readers of these tensors call `wait`, which gives them back; the caller holds it until then."""
    for tensor in tensors:
        tensor.__dict__[_WAIT] = weakref.ref(wait)
        tensor.__class__ = _waiting_kind(type(tensor))


def give_back(tensors: Iterable[DTensor]) -> None:
    """Ends `make_wait`."""
    for tensor in tensors:
        if tensor.__dict__.pop(_WAIT, None) is not None:
            tensor.__class__ = type(tensor).__mro__[2]


class _Waiting:
    """The methods of a waiting DTensor; the class that it had comes after this one."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        kind: Any = cls.__mro__[2]  # what is made like a waiting tensor, such as a gradient, does not wait itself
        return kind.__new__(kind, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for(self)
        return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_for(self)
        return copy.deepcopy(self, memo)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tensors_in((args, kwargs)):
            if isinstance(one, _Waiting):
                _wait_for(one)
        return func(*args, **(kwargs or {}))


def _wait_for(tensor: Any) -> None:
    wait = tensor.__dict__[_WAIT]()
    if wait is None:  # model and optimizer are gone, and so is the step: its thread holds it until it has ended
        give_back([tensor])
    else:
        wait()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    _wait_for(tensor)
    return held_local(tensor)


def _set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    _wait_for(tensor)
    replace_local(tensor, local)


@functools.cache
def _waiting_kind(kind: type[DTensor]) -> type[DTensor]:
    names = {"__slots__": (), "__module__": kind.__module__, "_local_tensor": property(_local, _set_local)}
    return type(kind.__name__, (_Waiting, kind), names)


class WaitingState(defaultdict[Any, dict[str, Any]]):
    """The state of an optimizer whose steps run on another thread: every access waits for them.

    They may make entries, and write to plain tensors in it, such as a count of steps.
    """

    def __init__(self, wait: Callable[[], None], state: dict[Any, dict[str, Any]]) -> None:
        super().__init__(dict, state)
        self.wait = wait

    def __reduce__(self) -> Any:
        self.wait()
        return defaultdict(dict, self).__reduce__()

    def __copy__(self) -> Any:
        self.wait()
        return defaultdict(dict, self)


def _after_waiting(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    @functools.wraps(plain)
    def method(self: WaitingState, *args: Any, **kwargs: Any) -> Any:
        self.wait()
        return plain(self, *args, **kwargs)

    return method


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__or__", "__repr__"),
    *("__reversed__", "__ror__", "__setitem__", "__ior__", "clear", "copy", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
):
    setattr(WaitingState, _name, _after_waiting(_name))
