"""The elements that have changed since the version before: found while a sender's copy is written, sent with checksums.

Note [Checksums]
Changes are sent only to a receiver that names the version before as the one that it has. Their CRC shows if one is
lost, moved or altered; a sum of all bytes of the result shows whether the receiver has what the sender has.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.weights.boxes import Box, Piece
from shardkit.weights.packing import Source, bytes_of, holding

__all__ = ["Changed", "apply", "changes", "update"]

Changed = dict[tuple[str, Box], npt.NDArray[Any]]
"""Which elements of a sender's parts have changed: positions in order, or a bitmap, whichever is shorter."""

_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 18  # elements: those of both versions stay in the cache until all is done with them


def update(kept: torch.Tensor, values: torch.Tensor) -> npt.NDArray[Any]:
    """Writes values of a part into `kept`, in its dtype; returns which of the elements have changed in any bit."""
    before, values = _units(kept), values.reshape(-1)
    block = torch.empty(min(_BLOCK, len(before)), dtype=kept.dtype)
    starts = range(0, len(before), _BLOCK)
    found: list[npt.NDArray[Any]] = []
    for start in starts:
        old = before[start : start + _BLOCK]
        new = _units(block[: len(old)].copy_(values[start : start + _BLOCK]))
        differs = new != old
        positions = np.flatnonzero(differs)
        if _few(len(positions), len(old)):
            old[positions] = new[positions]
            found.append(positions)
        else:
            old[:] = new
            found.append(np.packbits(differs))
    if any(one.dtype == np.uint8 for one in found):
        sizes = (min(_BLOCK, len(before) - start) for start in starts)
        return np.concatenate([_bits(one, size) for one, size in zip(found, sizes, strict=True)])
    return np.concatenate([np.empty(0, np.int64), *(one + start for one, start in zip(found, starts, strict=True))])


def changes(pieces: Sequence[Piece], source: Source, changed: Changed) -> tuple[dict[str, Any], torch.Tensor] | None:
    """The changes of a bucket, from its pieces; None if they take no less than the bucket itself, or are not known.

    They take the changed elements, and at most one bit for each element.
    """
    counts: list[int] = []
    parts: list[npt.NDArray[Any]] = []
    total = 0
    for piece in pieces:
        held = holding(piece, source)
        if (known := changed.get((piece.name, held.box))) is None:
            return None
        view = held.of(piece.box)
        new = _units(view.contiguous())
        where = _places(known, held.tensor, view)
        total += _sum(new)
        values = new[where]
        counts.append(len(values))
        if not _few(len(values), len(new)):
            where = _bits(where, len(new))
        elif where.dtype == bool:
            where = np.flatnonzero(where)
        parts += [where if where.dtype == np.uint8 else where.astype(np.int32), values]
    if sum(one.nbytes for one in parts) >= sum(piece.nbytes for piece in pieces):
        return None
    data = torch.from_numpy(np.concatenate([one.view(np.uint8) for one in parts]))
    told = {"counts": counts, "bytes": data.nbytes, "crc": zlib.crc32(bytes_of(data)), "sum": total}
    return told, data


def apply(told: dict[str, Any], data: torch.Tensor, pieces: Sequence[Piece], bucket: torch.Tensor) -> None:
    """Turns the old bytes of `bucket` into the new ones. Raises ConnectionError if it sees that the result is not what
    the sender has.
    """
    sent, at, offset = data.numpy(), 0, 0
    if zlib.crc32(bytes_of(data)) == told["crc"]:
        total = 0
        for piece, count in zip(pieces, told["counts"], strict=True):
            values = _units(bucket[offset : offset + piece.nbytes], piece.dtype.itemsize)
            if _few(count, len(values)):
                new = at + 4 * count
                where = sent[at:new].view(np.int32)
            else:
                new = at - (-len(values) // 8)
                where = np.unpackbits(sent[at:new], count=len(values)).view(bool)
            at = new + count * values.itemsize
            values[where] = sent[new:at].view(values.dtype)
            total += _sum(values)
            offset += piece.nbytes
        if total == told["sum"]:
            return
    raise ConnectionError("the checksum of the changes differs; the whole is sent again; read the senders' logs")


def _few(count: int, size: int) -> bool:
    """Whether positions of four bytes are shorter than one bit for each element."""
    return 32 * count < size


def _bits(where: npt.NDArray[Any], size: int) -> npt.NDArray[np.uint8]:
    """One bit for each element, from these, from booleans, or from positions."""
    if where.dtype == np.uint8:
        return where
    everywhere = np.zeros(size, bool)
    everywhere[where] = True
    return np.packbits(everywhere)


def _places(changed: npt.NDArray[Any], whole: torch.Tensor, part: torch.Tensor) -> npt.NDArray[Any]:
    """Positions or booleans of a view of a tensor, from the positions or bits of the tensor."""
    first = part.storage_offset() - whole.storage_offset()
    if changed.dtype == np.uint8:
        everywhere = torch.from_numpy(np.unpackbits(changed, count=whole.numel()).view(bool))
        return everywhere.as_strided(part.shape, part.stride(), first).reshape(-1).numpy()
    last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    start, stop = np.searchsorted(changed, [int(first), int(last) + 1])
    rest = changed[start:stop] - first
    if part.is_contiguous():
        return rest
    inside, positions = np.ones(len(rest), bool), np.zeros_like(rest)
    for size, stride in zip(part.shape, part.stride(), strict=True):
        index, rest = np.divmod(rest, stride)
        inside &= index < size
        positions = positions * size + index
    return positions[inside]


def _units(tensor: torch.Tensor, itemsize: int = 0) -> npt.NDArray[Any]:
    """Its elements, as numbers whose bits are compared."""
    return tensor.view(-1).view(_UNITS[itemsize or tensor.itemsize]).numpy()


def _sum(values: npt.NDArray[Any]) -> int:
    data = values.view(np.uint8)
    even = data.size // 8 * 8
    return int(data[:even].view(np.int64).sum()) + int.from_bytes(data[even:].tobytes(), "little")
