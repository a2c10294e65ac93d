"""The elements of a bucket that have changed: positions or a bitmap, whichever is less, values, and a checksum."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.weights.boxes import Piece, dtype_named

__all__ = ["apply", "changes"]

_UNITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_ROW = 8192  # bytes
_CHUNK = 32 * _ROW  # bytes: those of both versions stay in the cache until all is done with them


def changes(
    pieces: Sequence[Piece], new: torch.Tensor, old: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor] | None:
    """The changes from the old bytes of a bucket to the new ones; None if they take no less than the bucket itself.

    It takes the changed elements, and at most one bit for each element. `old` becomes `new`.
    """
    # The narrowest dtype of the bucket: wider elements are several units.
    unit = min(8, *(dtype_named(piece.dtype).itemsize for piece in pieces))
    size, checksum = new.numel() // unit, _Checksum()
    positions: list[npt.NDArray[Any]] = []
    values: list[npt.NDArray[Any]] = []
    count = 0
    for start in range(0, new.numel(), _CHUNK):
        there, before = (one[start : start + _CHUNK].numpy() for one in (new, old))
        checksum.add(there)
        there, before = there.view(_UNITS[unit]), before.view(_UNITS[unit])
        changed = _changed(there, before)
        count += len(changed)
        values.append(there[changed])
        before[changed] = values[-1]
        positions.append(changed if len(changed) * 32 < len(there) else _bits(changed, len(there)))
        if count * unit + min(count * 4, -(-size // 8)) >= new.numel():
            old[start:].copy_(new[start:])
            return None
    dense = size <= 32 * count
    chunks = range(0, size, _CHUNK // unit)
    if dense:
        sizes = (min(_CHUNK // unit, size - at) for at in chunks)
        where = [one if one.dtype == np.uint8 else _bits(one, n) for one, n in zip(positions, sizes, strict=True)]
    else:
        where = [(_positions(one) + at).astype(np.int32) for one, at in zip(positions, chunks, strict=True)]
    data = np.concatenate([one.view(np.uint8) for one in where + values] or [np.empty(0, np.uint8)])
    told = {"unit": unit, "count": count, "dense": dense, "bytes": data.nbytes, "checksum": checksum.value}
    return told, torch.from_numpy(data)


def apply(told: dict[str, Any], data: torch.Tensor, bucket: torch.Tensor) -> None:
    """Turns the old bytes of `bucket` into the new ones. Raises ConnectionError if the result is not what the sender
    has.
    """
    unit, count = told["unit"], told["count"]
    values = bucket.numpy().view(_UNITS[unit])
    length = -(-values.size // 8) if told["dense"] else 4 * count
    where, new = data[:length].numpy(), data[length:].numpy()
    if told["dense"]:
        positions = np.unpackbits(where, count=values.size).view(bool)
        fits = np.count_nonzero(positions) == count
    else:
        positions = where.view(np.int32)
        fits = len(positions) == count and (not count or 0 <= positions.min() <= positions.max() < values.size)
    if fits and len(new) == count * unit:
        values[positions] = new.view(_UNITS[unit])
        checksum = _Checksum()
        for start in range(0, bucket.numel(), _CHUNK):
            checksum.add(bucket[start : start + _CHUNK].numpy())
        if checksum.value == told["checksum"]:
            return
    raise ConnectionError("the checksum of the changes differs; the whole is sent again; read the senders' logs")


def _changed(values: npt.NDArray[Any], before: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The positions that differ: words of eight bytes first, of which most are equal."""
    each = 8 // values.itemsize
    even = values.size // each * each
    there, here = values[:even].view(np.int64), before[:even].view(np.int64)
    words = np.flatnonzero(there != here)
    if each * len(words) > values.size // 4:
        return np.flatnonzero(values != before)
    lanes = np.flatnonzero((there[words] ^ here[words]).view(values.dtype))
    rest = even + np.flatnonzero(values[even:] != before[even:])
    return np.concatenate([words[lanes // each] * each + lanes % each, rest])


def _bits(positions: npt.NDArray[Any], size: int) -> npt.NDArray[np.uint8]:
    """One bit for each element: much less than positions, if there are many."""
    everywhere = np.zeros(size, bool)
    everywhere[positions] = True
    return np.packbits(everywhere)


def _positions(found: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Of bits, or of positions."""
    return np.flatnonzero(np.unpackbits(found)) if found.dtype == np.uint8 else found


class _Checksum:
    """Of bytes that are added in order, all but the last in whole rows: the CRC of the sums of rows and columns, in
    which a value that is lost, moved or changed shows. It takes less than half of the time of the CRC of all.
    """

    def __init__(self) -> None:
        self._columns = np.zeros(_ROW // 8, np.int64)
        self._rows: list[npt.NDArray[np.int64]] = []
        self._rest = b""

    def add(self, data: npt.NDArray[np.uint8]) -> None:
        even = data.size // _ROW * _ROW
        words = data[:even].view(np.int64).reshape(-1, _ROW // 8)
        self._columns += words.sum(0)  # which may overflow
        self._rows.append(words.sum(1))
        self._rest = data[even:].tobytes()

    @property
    def value(self) -> int:
        return zlib.crc32(self._rest, zlib.crc32(np.concatenate([self._columns, *self._rows]).data))
