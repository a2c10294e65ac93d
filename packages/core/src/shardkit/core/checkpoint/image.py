"""Staging memory: the image of this rank's data file, as it will lie on disk, with the values left to be copied in.

Heads and tails of the archives are there from the beginning. So saving is one copy for each tensor, and writing is
hashing and writing one range of memory: nothing that holds Python's interpreter lock for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardkit.core.checkpoint.archive import archive_of
from shardkit.core.checkpoint.pieces import Piece
from shardkit.core.torch_compat import foreach_copy_

__all__ = ["Image", "places"]


def places(pieces: Iterable[Piece], end: int = 0) -> tuple[list[int], int]:
    """Where each piece's archive begins in a data file that is filled up to `end`, and where the last one ends."""
    starts = []
    for piece in pieces:
        archive = archive_of(piece.dtype, piece.sizes)
        start = archive.place(end)
        starts.append(start)
        end = start + archive.length
    return starts, end


class Image:
    """The data file of `pieces`; its memory is kept from save to save.

    Attributes:
        pieces: what it has room for, in order.
        memory: uint8, the bytes of the file.
    """

    def __init__(self, pieces: Sequence[Piece], *, pinned: bool) -> None:
        self.pieces = tuple(pieces)
        self.pinned = pinned
        starts, end = places(pieces)
        self.memory = torch.zeros(end, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._views: list[torch.Tensor] = []
        for piece, start in zip(pieces, starts, strict=True):
            archive = archive_of(piece.dtype, piece.sizes)
            values, end = start + len(archive.head), start + archive.length
            self._write(start, archive.head)
            self._write(end - len(archive.tail), archive.tail)
            view = self.memory[values : values + archive.nbytes].view(piece.dtype).view(piece.sizes)
            self._views.append(view)

    def _write(self, at: int, data: bytes) -> None:
        if data:  # an archive of a tensor without elements is all head
            self.memory[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @torch.no_grad()
    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Copies the values of the pieces in. When it returns they may be changed again."""
        here = [(view, value) for view, value in zip(self._views, values, strict=True) if value.device.type == "cpu"]
        if here:
            foreach_copy_([view for view, _ in here], [value for _, value in here])
        devices = set()
        for view, value in zip(self._views, values, strict=True):
            if value.device.type != "cpu":
                view.copy_(value, non_blocking=self.pinned)
                devices.add(value.device)
        for device in devices:
            torch.get_device_module(device).current_stream(device).synchronize()

    def bytes(self) -> memoryview:
        """The memory."""
        array: Any = self.memory.numpy()
        return memoryview(array)
