"""Rows of bytes between the ranks of a group that share no memory, over whatever transport the group has.

It belongs to one parameter group, whose rounding errors it keeps when they are fed back (`residuals`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardkit.core.policies import CompressionPolicy
from shardkit.core.runtime.buffers import note_freed
from shardkit.core.runtime.compressed.rows import format_of
from shardkit.core.runtime.slots import Slots
from shardkit.core.runtime.transport.interface import Collective, Exchange, Transport

if TYPE_CHECKING:
    from shardkit.core.runtime.compressed.gather import GatherRows
    from shardkit.core.runtime.compressed.reduce import ReduceRows
    from shardkit.core.runtime.plan import GatherItem, GatherPlan, ReduceItem, ReducePlan


class CompressedTransport:
    """Sends rows through `over`: pairwise straight to whom they are for, else by one collective on bytes.

    `gathers` and `reductions` are what plans have prepared; `residuals` belong to an FQN and the rank it is sent to.
    """

    direct = True
    packs = False
    padded = False
    sums_locally = True

    def __init__(self, over: Collective, policy: CompressionPolicy) -> None:
        self.group = over.group
        self.device = over.device
        self.rank = over.rank
        self.world_size = over.world_size
        self.policy = policy
        self.padded_rows = over.padded
        self.residuals: dict[tuple[str, int], torch.Tensor] = {}
        weakref.finalize(self, _note_gone, self.residuals).atexit = False
        self.gathers: WeakKeyDictionary[GatherPlan, GatherRows] = WeakKeyDictionary()
        self.reductions: WeakKeyDictionary[ReducePlan, ReduceRows] = WeakKeyDictionary()
        self._over = over

    def forget_residuals(self) -> None:
        """Drops the errors that wait to be fed back: they belong to gradients of an iteration that failed."""
        self._forget({fqn for fqn, _ in self.residuals})

    def _forget(self, fqns: Set[str]) -> None:
        for key in [key for key in self.residuals if key[0] in fqns]:
            note_freed(self.residuals.pop(key), key[0], "residual")

    def share(self, buffer: torch.Tensor, slots: Slots) -> Sequence[dist.Work]:
        """Fills every rank's slot of `buffer` with what that rank has in its own."""
        return self._over.all_gather([buffer], [slots])

    def swap(
        self, outgoing: torch.Tensor, sent: Sequence[int], incoming: torch.Tensor, received: Sequence[int]
    ) -> Sequence[dist.Work]:
        """Sends part `r` of `outgoing`, `sent[r]` bytes, to each rank `r`; part `r` of `incoming` comes from there.

        The parts of this rank itself are empty.
        """
        if isinstance(self._over, Exchange):
            return self._over.exchange(_parts(outgoing, sent), _parts(incoming, received))
        work = dist.all_to_all_single(
            incoming, outgoing, list(received), list(sent), group=self.group, async_op=self.device.type == "cpu"
        )
        return () if work is None else (work,)

    def for_gather(self, items: Sequence[GatherItem]) -> Transport:
        """This transport if it makes any of `items` smaller, else the one below, which gathers in place."""
        formats = [format_of(self.policy.gather, self.policy.block, item.layout, item.dtype) for item in items]
        return self._over if all(form.lossless for form in formats) else self

    def for_reduction(self, items: Sequence[ReduceItem], wire_dtype: torch.dtype) -> Transport:
        """Likewise for gradients that would travel in `wire_dtype` uncompressed; then no error of theirs comes back."""
        formats = [format_of(self.policy.reduce, self.policy.block, item.layout, wire_dtype) for item in items]
        if not all(form.lossless for form in formats):
            return self
        self._forget({item.fqn for item in items})
        return self._over

    def gather_buffer(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        return self._over.gather_buffer(numel, dtype, label)

    def reduce_buffer(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        return self._over.reduce_buffer(numel, dtype, label)


def _note_gone(residuals: dict[tuple[str, int], torch.Tensor]) -> None:
    for (fqn, _), residual in residuals.items():
        note_freed(residual, fqn, "residual")


def _parts(buffer: torch.Tensor, sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    return [[part] if part.numel() else [] for part in buffer.split_with_sizes(list(sizes))]
