"""Copies pieces between tensors and buckets of bytes; a copy also casts, and runs on the device of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from shardkit.core.checkpoint.plan import boxes_of
from shardkit.weights.adapters import Factors, merged
from shardkit.weights.boxes import Box, Held, Piece, intersection, is_castable


class Values(NamedTuple):
    """The values of a box of a tensor; with `factors`, those of the whole tensor, their product is added."""

    box: Box
    tensor: torch.Tensor
    factors: Factors | None = None

    def of(self, part: Box) -> torch.Tensor:
        """The values of a part of the box."""
        values = self.tensor[
            tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, self.box, strict=True))
        ]
        if self.factors is None:
            return values
        rows, columns = (slice(*run) for run in part)
        return values + self.factors[0][rows] @ self.factors[1][:, columns]


Source = Mapping[str, Sequence[Values]]
"""The boxes of each tensor that a sender holds, with their values."""

Names = Callable[[str], str | Sequence[str] | None]


def describe(
    model: nn.Module | Mapping[str, torch.Tensor], names: Names, dtype: torch.dtype | None, *, merge: bool = False
) -> tuple[list[Held], Source]:
    """The parts of a model that this rank holds, and their values; views, so nothing is copied.

    Collective with `merge`. Raises TypeError for a value that is not a dense tensor; ValueError if two tensors have one
    name, or a placement is neither Replicate nor sharding, and as `merged`.
    """
    held: list[Held] = []
    source: dict[str, list[Values]] = {}
    of: dict[str, str] = {}
    factors: Mapping[str, Factors] = {}
    state = model.state_dict() if isinstance(model, nn.Module) else model
    if merge and isinstance(model, nn.Module):
        state, factors = merged(model)
    for fqn, tensor in state.items():
        named = names(fqn)
        for name in () if named is None else (named,) if isinstance(named, str) else named:
            if name in of:
                raise ValueError(f"'{of[name]}' and '{fqn}' are both named '{name}'; give them names of their own")
            of[name] = fqn
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
                raise TypeError(f"'{fqn}' is not a dense tensor with values; leave it out: names= returns None for it")
            source[name] = [
                Values(tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True)), view, factors.get(fqn))
                for offsets, sizes, view in boxes_of((fqn,), tensor)
            ]
            wire = dtype if dtype is not None and is_castable(tensor.dtype) else tensor.dtype
            held.append(Held(name, wire, tuple(tensor.shape), tuple(one.box for one in source[name])))
    return held, source


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data


def holding(piece: Piece, source: Source) -> Values:
    """The box of a sender in which a piece lies."""
    return next(one for one in source[piece.name] if intersection(one.box, piece.box) == piece.box)


@torch.no_grad()
def pack(pieces: Sequence[Piece], values: Sequence[Values], bucket: torch.Tensor) -> None:
    """Copies pieces into `bucket`, each from the values beside it."""
    for (piece, part), one in zip(_parts(pieces, bucket), values, strict=True):
        # Into pinned memory nobody would wait for values of a GPU.
        part.copy_(one.of(piece.box), non_blocking=bucket.is_cuda)


@torch.inference_mode()  # targets may be inference tensors
def unpack(pieces: Sequence[Piece], bucket: torch.Tensor, views: Sequence[Values]) -> None:
    """Copies pieces out of `bucket` into the views that want them, by number."""
    for piece, part in _parts(pieces, bucket):
        views[piece.want].of(piece.box).copy_(part)


def _parts(pieces: Sequence[Piece], bucket: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    offset = 0
    for piece in pieces:
        data = bucket[offset : offset + piece.nbytes].view(piece.dtype)
        yield piece, data.view([stop - start for start, stop in piece.box])
        offset += piece.nbytes
