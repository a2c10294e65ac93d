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

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.torch_compat import TorchDispatchMode

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

    Sharded tensors are filled from whole ones; `close` notes that one is complete. Tensors that are not watched count
    as initialised.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[int, _Memory] = {}
        self._alive: dict[int, torch.Tensor] = {}  # an address must not be reused while it is watched
        self._open: dict[int, DTensor] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """Watches a tensor that is not initialised yet."""
        if isinstance(tensor, DTensor):
            self._open[id(tensor)] = tensor
        elif tensor.numel():
            self._alive[id(tensor)] = tensor
            self._memories.setdefault(_address(tensor), _Memory(tensor)).watch(tensor)

    def drop(self, tensor: torch.Tensor) -> None:
        """Watches a plain tensor no longer."""
        self._alive.pop(id(tensor), None)
        self._memories.pop(_address(tensor), None)

    def close(self, tensor: DTensor) -> None:
        """Notes that all of a sharded tensor is initialised."""
        self._open.pop(id(tensor), None)

    def is_initialised(self, tensor: torch.Tensor) -> bool:
        """Whether all elements of a tensor were overwritten, or its memory is not the watched one."""
        if isinstance(tensor, DTensor):
            return id(tensor) not in self._open
        memory = self._memories.get(_address(tensor))
        return memory is None or not tensor.numel() or memory.is_overwritten(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = str(func).split(".")[1]
        if operator in _RANDOM and isinstance(args[0], DTensor):
            raise RuntimeError(
                f"an initialiser calls {operator} on a sharded tensor of shape {tuple(args[0].shape)} that it did not "
                "get from its module: read the parameter as an attribute of the module, where it is whole"
            )
        result = func(*args, **kwargs)
        written: Any = args[0] if operator in _OVERWRITING else kwargs.get("out")
        for tensor in written if isinstance(written, list | tuple) else [written]:
            memory = None if tensor is None or isinstance(tensor, DTensor) else self._memories.get(_address(tensor))
            if memory is not None:
                memory.overwrite(tensor)
        return result


def _address(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _geometry(tensor: torch.Tensor) -> Geometry:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
