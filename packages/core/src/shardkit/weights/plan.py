"""Who sends what: a pure function of two descriptions. Nothing is communicated, no tensor is read.

Note [Shares]
The plan of one receiver does not depend on the others, so those that are there keep theirs when one more joins. Each
needed element leaves exactly one sender. Where several senders hold the same elements (replicas), these are cut into
parts of at most a sixteenth of a sender's fair share, and each part goes to the sender with the least so far. Parts
that only one sender holds are given out first. Equally loaded senders take turns, and `turn`, the receiver's number,
says who begins, so that the same few bytes of many receivers do not all come from rank 0.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.weights.boxes import Box, Held, Piece, Wanted, intersection, is_castable, numel

BUCKET = 64 << 20
"""Bytes that are packed and sent at a time."""

Runs = list[tuple[int, int, list[Piece]]]
"""Buckets: offset in the stream, bytes, pieces."""

_PARTS = 16  # of a sender's fair share; see Note [Shares]


@dataclass
class _Tensor:
    """A tensor as the senders hold it: its distinct boxes, and the ranks that hold each."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    holders: dict[Box, list[int]] = field(default_factory=dict)

    def cover(self, box: Box) -> list[tuple[Box, list[int]]]:
        """The parts of a box that lie in the different boxes here, and who holds them."""
        near = itertools.compress(self.holders.items(), _overlaps(_bounds(tuple(self.holders)), box))
        return [(both, holders) for held, holders in near if (both := intersection(box, held)) is not None]


class Provided:
    """All that the senders hold together. They must agree about the shape, the dtype and the cuts of each tensor."""

    def __init__(self, senders: Mapping[int, Sequence[Held]]) -> None:
        self.ranks = sorted(senders)
        self.tensors: dict[str, _Tensor] = {}
        for rank in self.ranks:
            for one in senders[rank]:
                tensor = self.tensors.setdefault(one.name, _Tensor(one.dtype, one.shape))
                if (tensor.dtype, tensor.shape) != (one.dtype, one.shape):
                    raise ValueError(
                        f"{one.name}: sender {rank} holds {one.dtype} of shape {one.shape}, another sender "
                        f"{tensor.dtype} of shape {tensor.shape}; give both the same name only if they are one tensor"
                    )
                for box in one.boxes:
                    tensor.holders.setdefault(box, []).append(rank)
        for name, tensor in self.tensors.items():
            if not _are_disjoint(tuple(tensor.holders)):
                raise ValueError(
                    f"{name}: some senders hold parts that overlap, such as {_readable(next(iter(tensor.holders)))}; "
                    "give both the same name only if they are cut alike"
                )


def plan(provided: Provided, wants: Sequence[Wanted], *, bucket: int = BUCKET, turn: int = 0) -> dict[int, list[Piece]]:
    """The pieces that each sender sends to one receiver, in order: wider dtypes first, so that all are aligned.

    See Note [Shares]. Each piece has at most `bucket` bytes, but at least one element. Raises ValueError, which names
    each tensor that no sender has, whose shape differs, or of which a part is missing.
    """
    found: list[tuple[Piece, list[int]]] = []
    problems: list[str] = []
    for number, want in enumerate(wants):
        tensor = provided.tensors.get(want.name)
        problem = _mismatch(want, tensor)
        if problem or tensor is None:
            problems.append(problem)
            continue
        covered = tensor.cover(want.box)
        if (there := sum(numel(box) for box, _ in covered)) < numel(want.box):
            problems.append(
                f"{want.name}: senders hold {there} of the {numel(want.box)} elements in {_readable(want.box)}"
            )
        found += [(Piece(want.name, tensor.dtype, box, number), holders) for box, holders in covered]
    if problems:
        more = f"\n... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(
            "\n".join(["the senders do not provide what this receiver wants:", *problems[:20]])
            + f"{more}\ncompare its targets with the sender's names="
        )
    return {
        rank: [part for piece in sorted(pieces, key=_order) for part in piece.cut(bucket)]
        for rank, pieces in _shares(provided.ranks, found, turn).items()
    }


def buckets(pieces: Sequence[Piece], limit: int) -> Runs:
    """Runs of consecutive pieces with at most `limit` bytes together."""
    found: Runs = []
    offset = nbytes = 0
    run: list[Piece] = []
    for piece in pieces:
        if run and nbytes + piece.nbytes > limit:
            found.append((offset, nbytes, run))
            offset, nbytes, run = offset + nbytes, 0, []
        run.append(piece)
        nbytes += piece.nbytes
    return [*found, (offset, nbytes, run)] if run else found


def _mismatch(want: Wanted, tensor: _Tensor | None) -> str:
    """Why a tensor cannot be what is wanted; "" if it can."""
    if tensor is None:
        return f"{want.name}: no sender has this tensor"
    if want.shape is not None and want.shape != tensor.shape:
        return f"{want.name}: wanted from a tensor of shape {want.shape}, its shape is {tensor.shape}"
    stops = [stop for _, stop in want.box]
    if len(stops) != len(tensor.shape) or any(stop > size for stop, size in zip(stops, tensor.shape, strict=True)):
        return f"{want.name}: wanted {_readable(want.box)}, which does not lie within its shape {tensor.shape}"
    if want.dtype != tensor.dtype and not (is_castable(want.dtype) and is_castable(tensor.dtype)):
        return f"{want.name}: sent as {tensor.dtype}, its target is {want.dtype}; receive into one of that dtype"
    return ""


def _readable(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


@functools.lru_cache(maxsize=64)  # layers are cut alike
def _are_disjoint(boxes: tuple[Box, ...]) -> bool:
    bounds = _bounds(boxes)
    return all(np.count_nonzero(_overlaps(bounds, box)) <= 1 for box in boxes)


@functools.lru_cache(maxsize=64)
def _bounds(boxes: tuple[Box, ...]) -> npt.NDArray[np.int64]:
    """Start and stop of each dim of each box."""
    return np.array(boxes, dtype=np.int64).reshape(len(boxes), len(boxes[0]) if boxes else 1, 2)


def _overlaps(bounds: npt.NDArray[np.int64], box: Box) -> npt.NDArray[np.bool_]:
    """Which of the boxes with these bounds share an element with a box."""
    start, stop = np.array(box, dtype=np.int64).reshape(-1, 2).T
    return np.asarray(((bounds[:, :, 0] < stop) & (start < bounds[:, :, 1])).all(axis=1))


def _shares(ranks: Sequence[int], found: Sequence[tuple[Piece, list[int]]], turn: int) -> dict[int, list[Piece]]:
    """See Note [Shares]."""
    most = sum(piece.nbytes for piece, _ in found) // (_PARTS * len(ranks))
    parts = [
        (part.nbytes, part, holders)
        for piece, holders in found
        for part in (piece.cut(most) if len(holders) > 1 else (piece,))
    ]
    parts.sort(key=lambda one: (len(one[2]) > 1, -one[0]))
    loads: Counter[int] = Counter()
    given: dict[int, list[Piece]] = {}
    for nbytes, piece, holders in parts:
        rank = min(holders, key=lambda rank: (loads[rank], (rank - turn) % (ranks[-1] + 1)))
        given.setdefault(rank, []).append(piece)
        loads[rank] += nbytes
    return given


def _order(piece: Piece) -> tuple[Any, ...]:
    """Wider dtypes first, then in the order of the receiver's targets."""
    return -piece.dtype.itemsize, str(piece.dtype), piece.want, piece.box
