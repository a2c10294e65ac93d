"""What a plan needs to know of the way bytes move, and what a program asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from shardkit.core.runtime.slots import Slots


class Transport(Protocol):
    """Moves the items of a plan between the ranks of one process group.

    `direct`: can move a list of tensors in place in one launch; if not, a plan packs everything into one buffer.
    `packs`: what is small, or cut on another dim than 0, is packed into one buffer all the same.
    `padded`: the slots of a buffer must be of one size.
    `sums_locally`: gradients go to their owner as they are, who sums them, instead of `reduce_scatter`.
    """

    group: dist.ProcessGroup
    device: torch.device
    rank: int
    world_size: int
    direct: bool
    packs: bool
    padded: bool
    sums_locally: bool

    def gather_buffer(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        """A 1-D buffer for the packed items of a gather."""

    def reduce_buffer(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        """A 1-D buffer for the packed gradients of a reduction, or for its output."""


@runtime_checkable
class Collective(Transport, Protocol):
    """A transport that works on flat buffers. All calls are collective over the group."""

    def all_gather(self, buffers: Sequence[torch.Tensor], slots: Sequence[Slots]) -> Sequence[dist.Work]:
        """Fill every rank's slot of each 1-D buffer with what that rank has in its own slot, in place."""

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any
    ) -> Sequence[dist.Work]:
        """Reduce each 1-D input (world_size rows) over the ranks and write this rank's row to the 1-D output."""


@runtime_checkable
class Exchange(Collective, Protocol):
    """A transport with which each rank sends its own data to each peer."""

    def exchange(
        self, outgoing: Sequence[Sequence[torch.Tensor]], incoming: Sequence[Sequence[torch.Tensor]]
    ) -> Sequence[dist.Work]:
        """Send `outgoing[peer]` to and receive `incoming[peer]` from every peer; the entries of `rank` are not used.

        What `a` sends to `b` must match what `b` receives from `a`, tensor by tensor, in bytes. Tensors are contiguous
        and not empty.
        """
