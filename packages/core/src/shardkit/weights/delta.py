"""The elements of a bucket that have changed: positions or a bitmap, whichever is less, values, and a checksum."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardkit.weights.boxes import Piece, dtype_named

__all__ = ["apply", "changes"]

_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changes(
    pieces: Sequence[Piece], new: torch.Tensor, old: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor] | None:
    """The changes from the old bytes of a bucket to the new ones; None if they take no less than the bucket itself.

    It takes the changed elements, and at most one bit for each element.
    """
    # The narrowest dtype of the bucket: wider elements are several units.
    unit = min(8, *(dtype_named(piece.dtype).itemsize for piece in pieces))
    values = new.view(_UNITS[unit])
    changed = values != old.view(_UNITS[unit])
    count = int(changed.count_nonzero())
    dense = changed.numel() <= 32 * count
    where = np.packbits(changed.numpy()) if dense else changed.nonzero().flatten().int().numpy()
    if where.nbytes + count * unit >= new.numel():
        return None
    data = np.concatenate([where.view(np.uint8), values[changed].numpy().view(np.uint8)])
    told = {
        "unit": unit,
        "count": count,
        "dense": dense,
        "bytes": data.nbytes,
        "checksum": zlib.crc32(new.numpy().data),
    }
    return told, torch.from_numpy(data)


def apply(told: dict[str, Any], data: torch.Tensor, bucket: torch.Tensor) -> None:
    """Turns the old bytes of `bucket` into the new ones. Raises ConnectionError if the result is not what the sender
    has.
    """
    unit, count = told["unit"], told["count"]
    values = bucket.view(_UNITS[unit])
    length = -(-values.numel() // 8) if told["dense"] else 4 * count
    where, new = data[:length].numpy(), data[length:]
    bits = np.unpackbits(where, count=values.numel()) if told["dense"] else None
    positions = np.flatnonzero(bits) if bits is not None else where.view(np.int32)
    if new.numel() == count * unit and len(positions) == count:
        # Values need not be aligned after a bitmap.
        values[torch.from_numpy(positions)] = new.clone().view(_UNITS[unit])
        if zlib.crc32(bucket.numpy().data) == told["checksum"]:
            return
    raise ConnectionError("the checksum of the changes differs; the whole is sent again; read the senders' logs")
