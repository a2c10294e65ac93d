"""Shared memory for what is read by peers once: gradients on their way out, shards that lie in ordinary memory."""

from __future__ import annotations

from typing import TypeAlias

import torch

from shardkit.core import events
from shardkit.core.runtime.shared.neighbours import Neighbours, Operation
from shardkit.core.runtime.shared.segment import ALIGNMENT, Segment, aligned, carve
from shardkit.core.runtime.shared.tables import Table

Specs: TypeAlias = tuple[tuple[int, torch.dtype], ...]
"""Elements and dtype of each tensor of a parcel."""


# Groups share parcels, and parameters used at random make ever new sets of gradients.
_MOST_CUTS = 256


class Parcel:
    """One segment, cut up for whoever uses it; each way of cutting it has a table, which is sent once.

    `operation` is the one that it was posted for last, None before that.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = Segment(nbytes)
        self.operation: Operation | None = None
        self._cuts: dict[tuple[str, Specs], tuple[list[torch.Tensor], Table]] = {}

    def cut(self, label: str, specs: Specs) -> tuple[list[torch.Tensor], Table]:
        """1-D tensors as `specs` says, one behind the other, and the table that lists them."""
        known = self._cuts.get((label, specs))
        if known is None:
            if len(self._cuts) >= _MOST_CUTS:
                self._cuts.clear()
            tensors, offset = [], 0
            for numel, dtype in specs:
                tensors.append(carve(self.memory, offset, (numel,), dtype))
                offset += aligned(numel * dtype.itemsize)
            known = self._cuts[label, specs] = tensors, Table(label, tensors)
        return known


class Outbox:
    """This rank's parcels. Memory is kept from step to step: what has been read by all peers is used again.

    When none of those that nobody reads any more is large enough for the next use, they are freed first.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._parcels: list[Parcel] = []

    def parcel(self, specs: Specs, label: str) -> Parcel:
        """A parcel with room for `specs`, contents undefined. The caller posts it before it asks for the next one."""
        nbytes = sum(aligned(numel * dtype.itemsize) for numel, dtype in specs) or ALIGNMENT
        idle = [parcel for parcel in self._parcels if self._is_idle(parcel)]
        fitting = [parcel for parcel in idle if parcel.memory.nbytes >= nbytes]
        if fitting:
            return min(fitting, key=lambda one: one.memory.nbytes)
        for parcel in idle:
            self._parcels.remove(parcel)
            _note(events.StorageFreed, parcel, label)
        parcel = Parcel(nbytes)
        self._parcels.append(parcel)
        _note(events.StorageAllocated, parcel, label)
        return parcel

    def _is_idle(self, parcel: Parcel) -> bool:
        return parcel.operation is None or self._neighbours.is_released(parcel.operation)


def _note(kind: type[events.StorageAllocated] | type[events.StorageFreed], parcel: Parcel, label: str) -> None:
    if events.hub.active:
        events.emit(kind(label, parcel.memory.nbytes, "outbox"))
