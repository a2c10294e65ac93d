"""What two checkpoints have in common, value by value and slab by slab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from shardkit.core.checkpoint.index import Index
from shardkit.core.checkpoint.reading import read_objects
from shardkit.core.checkpoint.rewriting import tensor_bytes
from shardkit.core.checkpoint.stored import StoredTensor, stored_tensors

__all__ = ["differences"]


def differences(first: tuple[Path, Index], second: tuple[Path, Index]) -> Iterator[str]:
    """A line for each tensor or object in which two checkpoints differ, to the last bit; however they are cut.

    Raises:
        DamagedCheckpointError: if either is damaged.
    """
    ours, theirs = ({one.name: one for one in stored_tensors(*each)} for each in (first, second))
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            yield f"{name}: only in {first[0] if b is None else second[0]}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{name}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        elif text := _of_values(a, b):
            yield f"{name}: {text}"
    yield from _of_objects(first, second)


def _of_values(a: StoredTensor, b: StoredTensor) -> str | None:
    different, largest = 0, 0.0
    for one, other in zip(a.slabs(), b.slabs(), strict=True):
        if tensor_bytes(one) == tensor_bytes(other):
            continue
        unequal = (one.reshape(-1, 1).view(torch.uint8) != other.reshape(-1, 1).view(torch.uint8)).any(dim=1)
        different += int(unequal.sum())
        gap = (one.to(torch.complex128) - other.to(torch.complex128)).abs().nan_to_num(float("inf"))
        largest = max(largest, float(gap.max()))
    numel = a.nbytes // a.dtype.itemsize
    return f"{different} of {numel} elements differ, by at most {largest:.3g}" if different else None


def _of_objects(first: tuple[Path, Index], second: tuple[Path, Index]) -> Iterator[str]:
    (ours, one), (theirs, other) = first, second
    values = read_objects(ours, one, one.objects), read_objects(theirs, other, other.objects)
    by_name = [
        {name: found[index.objects[name].path] for name in index.objects}
        for found, index in zip(values, (one, other), strict=True)
    ]
    for name in sorted(by_name[0].keys() | by_name[1].keys()):
        if name not in by_name[0] or name not in by_name[1]:
            yield f"{name}: only in {ours if name in by_name[0] else theirs}"
        elif repr(by_name[0][name]) != repr(by_name[1][name]):
            yield f"{name}: {_short(by_name[0][name])} and {_short(by_name[1][name])}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
