"""Allocates and frees storage, and reports this in events.

The bytes of a tensor are in its storage. Freeing a storage keeps every tensor over it, without memory. Allocating it
again makes all of them valid at once, including those that autograd saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch

from shardkit.core import events
from shardkit.core.events import StorageKind
from shardkit.core.runtime.sharding import dense_strides

_NOTHING_TO_LEAVE = contextlib.nullcontext()
_WHOLE = "_shardkit_whole"  # on the storage of a part: the buffer that it is a part of


def allocate_storage(tensor: torch.Tensor, fqn: str = "", kind: StorageKind = "unsharded") -> None:
    """Allocates the storage of ``tensor``, a dense one that reaches furthest into it. No-op if it is allocated."""
    storage = tensor.untyped_storage()
    nbytes = int(tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    if storage.nbytes() == nbytes:
        return
    storage.resize_(nbytes)
    note_allocated(nbytes, fqn, kind)


def allocate_missing(tensors: Iterable[torch.Tensor], sizes: Iterable[int], fqn: str) -> None:
    """Allocate those storages of `tensors` that have no memory, to `sizes` in bytes. Tensors may share a storage."""
    for tensor, nbytes in zip(tensors, sizes, strict=True):
        storage = tensor.untyped_storage()
        if nbytes and not storage.nbytes():
            storage.resize_(nbytes)
            note_allocated(nbytes, fqn, "unsharded")


def free_storage(tensor: torch.Tensor, fqn: str = "", kind: StorageKind = "unsharded") -> None:
    """Frees the memory under ``tensor`` and all views of the same storage. No-op if it is already free."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes == 0:
        return
    try:
        storage.resize_(0)
    except RuntimeError as error:
        raise RuntimeError(
            f"the memory of parameter '{fqn}' cannot be freed: {error}. Something else holds it, such as a numpy array "
            "that was made of the parameter in forward; make it of a clone"
        ) from error
    note_freed(nbytes, fqn, kind)


def outside_inference() -> contextlib.AbstractContextManager[None]:
    """Leaves inference mode: a first gather in it must not leave tensors that training cannot use.

    A step calls this for each parameter, and entering torch's context costs more than making a tensor.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING_TO_LEAVE


def flat_without_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 1-D tensor of `numel` elements whose storage is not allocated yet."""
    with outside_inference():
        flat = torch.empty(numel, dtype=dtype, device=device)
        flat.untyped_storage().resize_(0)
    return flat


def longer_flat(flat: torch.Tensor, numel: int) -> torch.Tensor:
    """A 1-D tensor of `numel` elements over the storage of ``flat``, which has too few; it has no memory afterwards."""
    with outside_inference():
        longer = dense_view(flat, torch.Size((numel,)))  # gives the storage memory
        longer.untyped_storage().resize_(0)
    return longer


def dense_view(flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A dense tensor of `shape` over the beginning of the storage of ``flat``, of the same dtype.

    Its version counter is a separate one, at 0 (`.data`; `set_` counts as a write): autograd does not mistake a gather
    for a user's in-place change. It stays valid when the storage is freed and allocated again.
    """
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), 0, shape, dense_strides(shape)).data


def part_of(buffer: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The dense `view` of `buffer` with a storage and a version counter of its own, over the same memory.

    torch.save writes no more than it, and torch cannot deepcopy a DTensor whose local tensor has an offset.
    """
    begin = view.storage_offset() * view.itemsize
    storage = buffer.untyped_storage()[begin : begin + view.nbytes]
    storage.__dict__[_WHOLE] = buffer
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride()).data


def runs(tensors: Sequence[torch.Tensor], places: Iterable[int]) -> list[tuple[torch.Tensor, list[int]]]:
    """A flat tensor over each run of tensors that lie one after the other in the same memory, and their places.

    Considers the tensors at `places`. Over parts of a buffer it is a view of that, which pinned memory knows to be in
    use. A tensor that is not contiguous is a run of its own, and copied.
    """
    found: list[tuple[torch.Tensor, int, list[int]]] = []
    ends: dict[tuple[int, torch.dtype, int], list[int]] = {}  # runs by where they end
    for place in places:
        tensor = tensors[place]
        storage, begin = tensor.untyped_storage(), int(tensor.storage_offset())
        whole = storage.__dict__.get(_WHOLE, tensor)
        if whole.dtype == tensor.dtype and whole is not tensor:
            begin += (storage.data_ptr() - whole.data_ptr()) // tensor.itemsize if whole.numel() else 0
        else:
            whole = tensor
        memory = whole.untyped_storage()._cdata
        run = ends.pop((memory, tensor.dtype, begin), None) if tensor.is_contiguous() else None
        if run is None:
            found.append((whole, begin, run := []))
        run.append(place)
        if tensor.is_contiguous():
            ends[memory, tensor.dtype, begin + tensor.numel()] = run
    return [
        (whole.as_strided((sum(tensors[place].numel() for place in run),), (1,), begin), run)
        if tensors[run[0]].is_contiguous()
        else (tensors[run[0]].reshape(-1), run)
        for whole, begin, run in found
    ]


def note_allocated(memory: torch.Tensor | int, fqn: str, kind: StorageKind) -> None:
    """Reports a temporary buffer that was just allocated, or bytes of gradients that a reduction has taken over."""
    if events.hub.active:
        nbytes = memory if isinstance(memory, int) else memory.numel() * memory.itemsize
        events.emit(events.StorageAllocated(fqn, nbytes, kind))


def note_freed(memory: torch.Tensor | int, fqn: str, kind: StorageKind) -> None:
    """Reports that a temporary buffer, or gradients, are dropped now."""
    if events.hub.active:
        nbytes = memory if isinstance(memory, int) else memory.numel() * memory.itemsize
        events.emit(events.StorageFreed(fqn, nbytes, kind))
