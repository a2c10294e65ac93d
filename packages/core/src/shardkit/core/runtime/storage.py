"""Tensors that lie one after the other in the same memory, to be copied at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_WHOLE = "_shardkit_whole"  # on the storage of a part: the buffer that it is a part of


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
