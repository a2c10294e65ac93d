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


def changes(
    pieces: Sequence[Piece], new: torch.Tensor, old: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor] | None:
    """The changes from the old bytes of a bucket to the new ones; None if they take no less than the bucket itself.

    It takes the changed elements, and at most one bit for each element.
    """
    # The narrowest dtype of the bucket: wider elements are several units.
    unit = min(8, *(dtype_named(piece.dtype).itemsize for piece in pieces))
    values, before = (one.numpy().view(_UNITS[unit]) for one in (new, old))
    changed = _changed(values, before)
    count = np.count_nonzero(changed) if changed.dtype == bool else len(changed)
    dense = values.size <= 32 * count
    if dense and changed.dtype != bool:
        positions, changed = changed, np.zeros(values.size, bool)
        changed[positions] = True
    where = np.packbits(changed) if dense else _positions(changed).astype(np.int32)
    if where.nbytes + count * unit >= new.numel():
        return None
    data = np.concatenate([where.view(np.uint8), values[changed].view(np.uint8)])
    told = {"unit": unit, "count": int(count), "dense": dense, "bytes": data.nbytes, "checksum": _checksum(new)}
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
        if _checksum(bucket) == told["checksum"]:
            return
    raise ConnectionError("the checksum of the changes differs; the whole is sent again; read the senders' logs")


def _changed(values: npt.NDArray[Any], before: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The positions that differ, or for each whether it does: words of eight bytes first, of which most are equal."""
    each = 8 // values.itemsize
    even = values.size // each * each
    words = np.flatnonzero(values[:even].view(np.int64) != before[:even].view(np.int64))
    if each * len(words) > values.size // 4:
        everywhere: npt.NDArray[Any] = values != before
        return everywhere
    near = np.concatenate([(words[:, None] * each + np.arange(each)).ravel(), np.arange(even, values.size)])
    found: npt.NDArray[Any] = near[values[near] != before[near]]
    return found


def _positions(changed: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.flatnonzero(changed) if changed.dtype == bool else changed


def _checksum(data: torch.Tensor) -> int:
    """Of bytes: the CRC of the sums of rows and columns, in which a value that is lost, moved or changed shows. It
    takes less than half of the time of the CRC of all.
    """
    even = data.numel() // _ROW * _ROW
    words = data[:even].numpy().view(np.int64).reshape(-1, _ROW // 8)
    sums = np.concatenate([words.sum(0), words.sum(1)])  # which may overflow
    return zlib.crc32(data[even:].numpy().data, zlib.crc32(sums.data))
