"""Watches an initialisation: records at the operators which elements of which tensors are overwritten.

Note [What counts as initialised]

Fresh memory is garbage until it is overwritten, and values do not show this: garbage may be zeros, and NaN or any other
mark may be a legitimate value (and does not exist for integers). Version counters miss writes through `.data`, which
initialisers often use. So `InitialisationWatch`, a dispatch mode, looks at every operator that runs:

* An operator that overwrites (fill_, copy_, normal_, out=..., see `_OVERWRITING`) initialises exactly the elements of
the view that it receives: `table[:, 0::2] = ...` alone leaves every second column uninitialised.
* An operator that reads what it changes (mul_, add_, clamp_), or writes to computed places (index_put_, masked_fill_),
initialises nothing.
* A parameter or buffer that is replaced by assignment has other memory, and so counts as initialised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.parameters.region import region_of
from shardkit.core.torch_compat import TorchDispatchMode, local_of

_RANDOM = frozenset(
    {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
)
_OVERWRITING = _RANDOM | {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


class _Memory:
    """The elements of one storage that have been overwritten, counted in elements of `itemsize` bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._itemsize = tensor.element_size()
        self._numel = tensor.untyped_storage().nbytes() // self._itemsize
        self._complete: set[Geometry] = set()
        self._watched: set[Geometry] = {_geometry(tensor)}
        self._mask: torch.Tensor | None = None  # one byte an element, made only when part of a tensor is written

    def watch(self, tensor: torch.Tensor) -> None:
        self._watched.add(_geometry(tensor))

    def overwrite(self, view: torch.Tensor) -> None:
        if view.element_size() == self._itemsize and _geometry(view) in self._watched:
            self._complete.add(_geometry(view))
            return
        if self._mask is None:
            self._mask = torch.zeros(self._numel, dtype=torch.bool)
        if view.element_size() == self._itemsize:
            self._mask.as_strided(*_geometry(view)).fill_(True)
        elif view.is_contiguous():
            # Another view of the bytes, such as the real and imaginary parts of a complex tensor.
            start = view.storage_offset() * view.element_size()
            stop = start + view.numel() * view.element_size()
            self._mask[-(-start // self._itemsize) : stop // self._itemsize] = True

    def is_overwritten(self, tensor: torch.Tensor) -> bool:
        geometry = _geometry(tensor)
        return geometry in self._complete or (
            self._mask is not None and bool(self._mask.as_strided(*geometry).all().item())
        )


class InitialisationWatch(TorchDispatchMode):
    """Within this context, notes which elements of the watched tensors are overwritten.

    It also gives DTensors on CPU the random numbers that an unsharded tensor would get from the same generator: each
    rank draws the full tensor and keeps its piece. Otherwise every rank would fill its piece from the start of the same
    sequence, and shards would repeat each other. (On accelerators DTensor itself handles this.)
    """

    def __init__(self, tensors: Iterator[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[int, _Memory] = {}
        self._alive: list[torch.Tensor] = []  # an address must not be reused while it is watched
        for tensor in tensors:
            for local in _locals(tensor):
                self._alive.append(local)
                address = local.untyped_storage().data_ptr()
                self._memories.setdefault(address, _Memory(local)).watch(local)

    def is_initialised(self, tensor: torch.Tensor) -> bool:
        """Whether all elements of a tensor were overwritten, or its memory is not the watched one."""
        return all(
            memory.is_overwritten(local)
            for local in _locals(tensor)
            if (memory := self._memories.get(local.untyped_storage().data_ptr())) is not None
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = str(func).split(".")[1]
        if operator in _RANDOM and _is_dtensor_on_cpu(args[0]):
            result = _draw_like_unsharded(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        written = args[0] if operator in _OVERWRITING else kwargs.get("out")
        for tensor in written if isinstance(written, list | tuple) else [written]:
            for local in _locals(tensor):
                if (memory := self._memories.get(local.untyped_storage().data_ptr())) is not None:
                    memory.overwrite(local)
        return result


def _locals(tensor: object) -> list[torch.Tensor]:
    """The memory behind a tensor on this rank: none for an empty shard, which needs no initialisation."""
    if not isinstance(tensor, torch.Tensor):
        return []
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return [local] if local.numel() and not local.is_meta else []


def _geometry(tensor: torch.Tensor) -> Geometry:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _is_dtensor_on_cpu(tensor: object) -> bool:
    return isinstance(tensor, DTensor) and local_of(tensor).device.type == "cpu"


def _draw_like_unsharded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    func(full, *args[1:], **kwargs)
    local = local_of(tensor)
    if local.numel():
        local.copy_(region_of("a tensor being initialised", tensor).take(full))
    return tensor
