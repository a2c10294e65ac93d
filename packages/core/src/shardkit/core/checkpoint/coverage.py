"""Checks that boxes cover a tensor: when parts of files are combined, each element must occur once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol


class Box(Protocol):
    """A part of a tensor: one index and one size for each dim. If it has a `file`, messages name it."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...


def coverage_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why boxes do not cover a tensor of `shape` exactly once, None if they do; empty boxes are ignored, but must lie
    inside it.
    """
    for box in boxes:
        if not _is_inside(box, shape):
            return f"stick out of it: {_text(box)}"
    filled = [box for box in boxes if 0 not in box.sizes]
    covered, whole = sum(math.prod(box.sizes) for box in filled), math.prod(shape)
    if covered < whole:
        return f"leave holes: they hold {covered} of its {whole} elements"
    # Along the dim with the most cuts, few boxes begin before another one ends.
    dim = max(range(len(shape)), key=lambda dim: len({box.offsets[dim] for box in filled}), default=0)
    if shape:
        filled.sort(key=lambda box: box.offsets[dim])
    for number, box in enumerate(filled):
        end = box.offsets[dim] + box.sizes[dim] if shape else 0
        for later in range(number + 1, len(filled)):
            other = filled[later]
            if shape and other.offsets[dim] >= end:
                break  # sorted: all others begin after this one
            if _overlap(box, other):
                return f"overlap: {_text(box)} and {_text(other)}"
    return None


def _is_inside(box: Box, shape: Sequence[int]) -> bool:
    if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
        return False
    for low, size, whole in zip(box.offsets, box.sizes, shape, strict=True):  # a loop, as there may be many boxes
        if low < 0 or size < 0 or low + size > whole:
            return False
    return True


def _overlap(one: Box, other: Box) -> bool:
    return all(
        max(a, b) < min(a + a_size, b + b_size)
        for a, a_size, b, b_size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def _text(box: Box) -> str:
    runs = ", ".join(f"{low}:{low + size}" for low, size in zip(box.offsets, box.sizes, strict=False))
    file = getattr(box, "file", None)
    return f"[{runs}]" if file is None else f"[{runs}] in {file}"
