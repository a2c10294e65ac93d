"""The ranks that load or gather a state together: small objects to agree, bytes to move tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from shardkit.core.checkpoint.memory import bytes_of

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """The ranks of one process group, or this process alone where torch.distributed is not initialised.

    Ranks are group ranks throughout. Objects travel by pickle, between the processes of one job only.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Peers:
        """The ranks of `group`, by default of the default group."""
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1)
        group = group or dist.group.WORLD
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def gather(self, item: T) -> list[T] | None:
        """Everyone's item on rank 0, None elsewhere. Collective."""
        if self.size == 1:
            return [item]
        items: list[T] | None = cast(list[T], [None] * self.size) if self.rank == 0 else None
        dist.gather_object(item, items, group=self.group, group_dst=0)
        return items

    def from_rank0(self, item: T | None) -> T:
        """Rank 0's item on every rank. Collective."""
        box = [item]
        if self.size > 1:
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        return cast(T, box[0])

    def device_for(self, device_type: str) -> torch.device:
        """Where tensors have to be to travel, for tensors that live on `device_type`.

        gloo moves CPU memory only between two ranks, so what lives on an accelerator goes through it.
        """
        backends = dict(part.split(":", 1) for part in dist.get_backend_config(self.group).split(",") if ":" in part)
        if backends.get(device_type, "gloo") == "gloo" and "cpu" in backends:
            return torch.device("cpu")
        chosen = device_type if device_type in backends else next(iter(backends), device_type)
        return local_device(chosen)

    def exchange(
        self, sends: Iterable[tuple[int, torch.Tensor]] = (), receives: Iterable[tuple[int, torch.Tensor]] = ()
    ) -> None:
        """Sends and receives contiguous tensors, as bytes so that every dtype travels; returns when all have."""
        operations = [dist.P2POp(dist.isend, bytes_of(sent), group=self.group, group_peer=to) for to, sent in sends]
        operations += [dist.P2POp(dist.irecv, bytes_of(got), group=self.group, group_peer=by) for by, got in receives]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copies rank 0's contiguous tensor to every rank, in place. Collective."""
        if self.size > 1 and tensor.numel():
            dist.broadcast(bytes_of(tensor), group=self.group, group_src=0)


def local_device(device_type: str) -> torch.device:
    """This process's device of a type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
