"""Tables of the tensors in shared memory that a rank's peers may read.

A table is sent once and then identified by its number. It is JSON: data from another process is never executed. Memory
is named by a descriptor of its process, which peers, of the same user, open in `/proc`.
"""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch

from shardkit.core.runtime.shared.segment import Mapping, Segment, locate

_numbers = itertools.count(1)

Gradients: TypeAlias = Sequence[tuple[int, str]]


class Table:
    """Tensors of this rank that its peers may read, in a fixed order.

    `label` is the parameter group's name. `gradients` are the parameters whose gradients they are, as places in the
    group with FQNs (empty for shards). The peers compare label and places with their own.
    """

    def __init__(self, label: str, tensors: Sequence[torch.Tensor], gradients: Gradients = ()) -> None:
        self.number = next(_numbers)
        self.label = label
        self.gradients = dict(gradients)
        self.is_sent = False
        self._segments: dict[int, Segment] = {}  # which it keeps alive
        self._entries = [self._entry(tensor) for tensor in tensors]

    def _entry(self, tensor: torch.Tensor) -> tuple[int, int, int, str]:
        if not tensor.numel():
            return 0, 0, 0, "uint8"
        place = locate(tensor)
        assert place is not None and tensor.is_contiguous(), self.label
        segment, offset = place
        self._segments[segment.number] = segment
        return segment.number, offset, tensor.numel(), str(tensor.dtype).removeprefix("torch.")

    def describe(self) -> dict[str, Any]:
        """The table as its peers get it."""
        return {
            "label": self.label,
            "gradients": [*self.gradients.items()],
            "segments": [(number, segment.path) for number, segment in self._segments.items()],
            "entries": self._entries,
        }


class PeerTable:
    """A peer's table as seen by this rank: `label`, `gradients`, and 1-D `tensors` over the peer's memory."""

    def __init__(self, described: dict[str, Any], mapped: MutableMapping[int, Mapping]) -> None:
        """`mapped` are the peer's segments that are already mapped, by number: one mapping serves all tables."""
        self.label: str = described["label"]
        self.gradients: dict[int, str] = dict(described["gradients"])
        self._described = described
        self._mapped = mapped
        self._memory: dict[int, Mapping] = {}  # keeps the entries of `mapped` as long as this table

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors. To be read first within an operation for which the peer keeps their memory."""
        with torch.inference_mode(False):  # sums are made in them, whatever mode was active when they arrived
            for number, path in self._described["segments"]:
                self._memory[number] = self._mapped.get(number) or Mapping(path)
            self._mapped.update(self._memory)
            return [
                self._memory[segment].tensor(offset, numel, getattr(torch, name)) if numel else torch.empty(0)
                for segment, offset, numel, name in self._described["entries"]
            ]
