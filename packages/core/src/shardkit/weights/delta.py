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

Changed = dict[tuple[str, Box], npt.NDArray[np.uint8]]
"""Which elements of a sender's parts have changed: a bit for each."""

_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 18  # elements: those of both versions stay in the cache until all is done with them


def update(kept: torch.Tensor, values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Writes values of a part into `kept`, in its dtype; returns a bit for each element: whether it is another."""
    before, values = _units(kept), values.reshape(-1)
    changed = np.empty(-(-len(before) // 8), np.uint8)
    block = torch.empty(min(_BLOCK, len(before)), dtype=kept.dtype)
    for start in range(0, len(before), _BLOCK):
        old = before[start : start + _BLOCK]
        new = _units(block[: len(old)].copy_(values[start : start + _BLOCK]))
        changed[start // 8 : (start + len(old) + 7) // 8] = np.packbits(new != old)
        old[:] = new
    return changed


def changes(pieces: Sequence[Piece], source: Source, changed: Changed) -> tuple[dict[str, Any], torch.Tensor] | None:
    """The changes of a bucket: changed elements, and at most one bit for each element; None if they take no less than
    the bucket itself, or are not known.
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
        differs = _within(known, held.tensor, view)
        positions = np.flatnonzero(differs)
        total += _sum(new)
        counts.append(len(positions))
        few = _few(len(positions), len(new))
        parts += [positions.astype(np.int32) if few else np.packbits(differs), new[positions]]
    if sum(one.nbytes for one in parts) >= sum(piece.nbytes for piece in pieces):
        return None
    data = torch.from_numpy(np.concatenate([one.view(np.uint8) for one in parts]))
    told = {"counts": counts, "bytes": data.nbytes, "crc": zlib.crc32(bytes_of(data)), "sum": total}
    return told, data


def apply(told: dict[str, Any], data: torch.Tensor, pieces: Sequence[Piece], bucket: torch.Tensor) -> None:
    """Turns the old bytes of `bucket` into the new ones. Raises ConnectionError if they are not what the sender has."""
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


def _within(changed: npt.NDArray[np.uint8], whole: torch.Tensor, part: torch.Tensor) -> npt.NDArray[np.bool_]:
    """The bits of a view of a tensor, from those of the tensor."""
    first = part.storage_offset() - whole.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    differs = torch.from_numpy(np.unpackbits(changed[first // 8 : last // 8 + 1]).view(bool))
    return differs.as_strided(part.shape, part.stride(), first % 8).reshape(-1).numpy()


def _units(tensor: torch.Tensor, itemsize: int = 0) -> npt.NDArray[Any]:
    """Its elements, as numbers whose bits are compared."""
    return tensor.view(-1).view(_UNITS[itemsize or tensor.itemsize]).numpy()


def _sum(values: npt.NDArray[Any]) -> int:
    data = values.view(np.uint8)
    even = data.size // 8 * 8
    return int(data[:even].view(np.int64).sum()) + int.from_bytes(data[even:].tobytes(), "little")
