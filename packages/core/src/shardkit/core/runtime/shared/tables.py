"""Tables of the tensors in shared memory that a rank's peers may read.

A table is sent once and then identified by its number. Its description is sent in a separate memory file, so its size
is not limited. It is JSON: data from another process is never executed.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import MutableMapping, Sequence
from typing import TypeAlias

import torch

from shardkit.core.runtime.shared.segment import Mapping, Segment, check_sealed, locate, memory_file, seal

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
        self._entries: list[tuple[int, int, int, str]] = []
        for tensor in tensors:
            self._entries.append(self._entry(tensor))

    def _entry(self, tensor: torch.Tensor | None) -> tuple[int, int, int, str]:
        if tensor is None or not tensor.numel():
            return 0, 0, 0, "uint8"
        place = locate(tensor)
        assert place is not None and tensor.is_contiguous(), self.label
        segment, offset = place
        known = [one is segment for one in self.segments]
        if not any(known):
            self.segments.append(segment)
        index = known.index(True) if any(known) else len(self.segments) - 1
        return index, offset, tensor.numel(), str(tensor.dtype).removeprefix("torch.")

    def describe(self) -> int:
        """The file descriptor of a new memory file that holds this table's description; the caller closes it."""
        content = {
            "label": self.label,
            "gradients": [*self.gradients.items()],
            "segments": [segment.number for segment in self.segments],
            "entries": self._entries,
        }
        fd = memory_file("shardkit-table")
        os.write(fd, json.dumps(content).encode())
        seal(fd)
        return fd


class PeerTable:
    """A peer's table as seen by this rank: `label`, `gradients`, and 1-D `tensors` over the peer's memory."""

    @torch.inference_mode(False)  # sums are made in these tensors, whatever mode was active when they arrived
    def __init__(self, fds: Sequence[int], mapped: MutableMapping[int, Mapping]) -> None:
        """Maps the descriptors: the description, then the segments. They may be closed afterwards.

        `mapped` are the peer's segments that are already mapped, by number: one mapping serves all tables.
        """
        check_sealed(fds[0])
        content = json.loads(os.pread(fds[0], os.fstat(fds[0]).st_size, 0))
        self.label: str = content["label"]
        self.gradients: dict[int, str] = dict(content["gradients"])
        memory: list[Mapping] = []
        for number, fd in zip(content["segments"], fds[1:], strict=True):
            mapping = mapped.get(number)
            if mapping is None:
                mapping = mapped[number] = Mapping(fd)
            memory.append(mapping)
        self._memory = memory  # keeps the entries of `mapped` as long as this table
        self.tensors: list[torch.Tensor] = []
        for segment, offset, numel, name in content["entries"]:
            dtype: torch.dtype = getattr(torch, name)
            self.tensors.append(memory[segment].tensor(offset, numel, dtype) if numel else torch.empty(0))
