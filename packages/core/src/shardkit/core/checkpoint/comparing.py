"""What two checkpoints have in common, value by value and slab by slab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.index import Index
from shardkit.core.checkpoint.memory import bytes_of, memory_of
from shardkit.core.checkpoint.reading import read_objects, stored_tensors
from shardkit.core.checkpoint.stored import StoredTensor

__all__ = ["differences"]


def differences(
    first: tuple[Path, Index], second: tuple[Path, Index], progress: Callable[[int], object] = lambda _: None
) -> Iterator[str]:
    """A line for each tensor or object in which two checkpoints differ, to the last bit; however they are cut.

    `progress` is told how many bytes of the first one were done.

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
        progress(0 if a is None else a.nbytes)
    yield from _of_objects(first, second)


def _of_values(a: StoredTensor, b: StoredTensor) -> str | None:
    different = 0
    gaps: list[float] = []
    for one, other in zip(a.slabs(), b.slabs(), strict=True):
        if memory_of(one) == memory_of(other):
            continue
        unequal = (bytes_of(one) != bytes_of(other)).view(-1, one.itemsize).any(dim=1)
        different += int(unequal.sum())
        gaps += _gaps(one, other)
    numel = a.nbytes // a.dtype.itemsize
    by = f", by at most {max(gaps):.3g}" if gaps else ""
    return f"{different} of {numel} elements differ{by}" if different else None


def _gaps(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """The largest, if torch can calculate with the dtype: it cannot with two numbers of 4 bits in a byte."""
    try:
        gap = (one.to(torch.complex128) - other.to(torch.complex128)).abs().nan_to_num(float("inf"))
    except NotImplementedError:
        return []
    return [float(gap.max())]


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
        elif not _same(by_name[0][name], by_name[1][name]):
            yield f"{name}: {_short(by_name[0][name])} and {_short(by_name[1][name])}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _same(one: Any, other: Any) -> bool:
    """To the last bit and type: 0.0 is not -0.0, and NaN is NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        looks = [(value.dtype, value.shape, value.layout) for value in (one, other)]
        return looks[0] == looks[1] and _bits(one) == _bits(other)
    if isinstance(one, dict):
        return _same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other if isinstance(one, set) else repr(one) == repr(other)


def _bits(tensor: torch.Tensor) -> memoryview:
    return memory_of(tensor.to_dense().resolve_conj().resolve_neg().contiguous())
