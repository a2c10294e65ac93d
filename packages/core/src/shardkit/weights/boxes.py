"""Boxes of named tensors, which senders hold and receivers want, and their form on the wire."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardkit.core.parameters.region import Run

_T = TypeVar("_T")

Box = tuple[Run, ...]
"""The indices [start, stop) of each dim; empty for a tensor of no dims, which has one element."""


@dataclass(frozen=True)
class Held:
    """A tensor of which a sender holds `boxes`; `dtype` is the one on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Wanted:
    """A box of a tensor that a receiver wants in a `dtype`; the tensor must have `shape`, if that is not None."""

    name: str
    dtype: torch.dtype
    box: Box
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that one sender sends to one receiver, which wants it as its number `want`."""

    name: str
    dtype: torch.dtype
    box: Box
    want: int

    @property
    def nbytes(self) -> int:
        return numel(self.box) * self.dtype.itemsize

    def cut(self, most: int) -> Iterator[Piece]:
        """In parts of at most `most` bytes, but at least one element."""
        for box in cut(self.box, max(most // self.dtype.itemsize, 1)):
            yield Piece(self.name, self.dtype, box, self.want)


def numel(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def is_castable(dtype: torch.dtype) -> bool:
    """Whether values may be cast to it and from it: those of float8 mean nothing without a scale."""
    return dtype.is_floating_point and dtype.itemsize > 1


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name such as "bfloat16"."""
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} of a peer is not known to this torch; install the same version on both sides")
    return dtype


def intersection(one: Box, other: Box) -> Box | None:
    """The part that two boxes share; None if they share no element."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def cut(box: Box, most: int) -> Iterator[Box]:
    """A box in parts of at most `most` elements (at least 1), in memory order; parts of one dim are about equal."""
    count = numel(box)
    if count <= most:
        yield box
        return
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    parts = min(stop - start, -(-count // most))
    for part in range(parts):
        first, last = (start + (stop - start) * at // parts for at in (part, part + 1))
        yield from cut((*box[:dim], (first, last), *box[dim + 1 :]), most)


def encode(values: Sequence[Held] | Sequence[Wanted] | Sequence[Piece]) -> list[list[Any]]:
    """A list for JSON; `decode` is the reverse."""
    return [[name, name_of(dtype), *rest] for name, dtype, *rest in (vars(one).values() for one in values)]


def decode(kind: type[_T], values: list[list[Any]]) -> list[_T]:
    """The `Held`, `Wanted` or `Piece` of a peer. Raises TypeError or ValueError."""
    return [kind(name, dtype_named(dtype), *map(_frozen, rest)) for name, dtype, *rest in values]  # type: ignore[call-arg]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
