"""Tables of the tensors in shared memory that a rank's peers may read.

A table is sent once and then identified by its number. It is JSON: data from another process is never executed. Memory
is named by a descriptor of its process, which peers, of the same user, open in `/proc`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import MutableMapping, Sequence
from functools import cached_property
from typing import TypeAlias

import torch

from shardkit.core.runtime.shared.segment import Mapping, Segment, locate

_numbers = itertools.count(1)

Gradients: TypeAlias = Sequence[tuple[int, str]]


class Table:
    """Tensors of this rank that its peers may read, in a fixed order; None stands for no tensor.

    `label` is the parameter group's name. `gradients` are the parameters whose gradients they are, as places in the
    group with FQNs (empty for shards). The peers compare label and places with their own.
    """

    def __init__(self, label: str, tensors: Sequence[torch.Tensor | None], gradients: Gradients = ()) -> None:
        self.number = next(_numbers)
        self.label = label
        self.gradients = dict(gradients)
        self.segments: list[Segment] = []
        self._entries = [self._entry(tensor) for tensor in tensors]

    def _entry(self, tensor: torch.Tensor | None) -> tuple[int, int, int, str]:
        if tensor is None or not tensor.numel():
            return 0, 0, 0, "uint8"
        place = locate(tensor)
        assert place is not None and tensor.is_contiguous(), self.label
        segment, offset = place
        if segment not in self.segments:
            self.segments.append(segment)
        return self.segments.index(segment), offset, tensor.numel(), str(tensor.dtype).removeprefix("torch.")

    def describe(self) -> bytes:
        """The table as its peers get it."""
        content = {
            "label": self.label,
            "gradients": [*self.gradients.items()],
            "segments": [(segment.number, segment.path) for segment in self.segments],
            "entries": self._entries,
        }
        return json.dumps(content).encode()


class PeerTable:
    """A peer's table as seen by this rank: `label`, `gradients`, and 1-D `tensors` over the peer's memory."""

    def __init__(self, description: bytes, mapped: MutableMapping[int, Mapping]) -> None:
        """`mapped` are the peer's segments that are already mapped, by number: one mapping serves all tables."""
        content = json.loads(description)
        self.label: str = content["label"]
        self.gradients: dict[int, str] = dict(content["gradients"])
        self._segments: list[tuple[int, str]] = content["segments"]
        self._entries: list[tuple[int, int, int, str]] = content["entries"]
        self._mapped = mapped
        self._memory: list[Mapping] = []  # keeps the entries of `mapped` as long as this table

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors. To be read first within an operation for which the peer keeps their memory."""
        with torch.inference_mode(False):  # sums are made in them, whatever mode was active when they arrived
            memory = [self._mapped.get(number) or Mapping(path) for number, path in self._segments]
            self._mapped.update(zip((number for number, _ in self._segments), memory, strict=True))
            self._memory = memory
            return [
                memory[segment].tensor(offset, numel, getattr(torch, name)) if numel else torch.empty(0)
                for segment, offset, numel, name in self._entries
            ]
