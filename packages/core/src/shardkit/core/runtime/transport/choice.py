"""Which transports serve one parameter group: by what its user has set, and what its process groups can do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardkit.core.policies import AllGather, CompressionPolicy, ReduceScatter
from shardkit.core.runtime.transport import Transport, compressing, transport_for
from shardkit.core.runtime.transport.compressed import CompressedTransport
from shardkit.core.runtime.transport.custom import CustomTransport

__all__ = ["Transports", "choose_transports"]


@dataclass(frozen=True)
class Transports:
    """What moves the bytes of a group; None when there is nobody to send them to."""

    gather: Transport | None
    reduce: Transport | None

    def forget_residuals(self) -> None:
        """Drops rounding errors that wait to be fed back."""
        if isinstance(self.reduce, CompressedTransport):
            self.reduce.forget_residuals()


def choose_transports(
    group: dist.ProcessGroup | None,
    reduce_group: dist.ProcessGroup | None,
    device: torch.device,
    all_gather: AllGather | None,
    reduce_scatter: ReduceScatter | None,
    compression: CompressionPolicy | None,
    label: str,
) -> Transports:
    """The transports over the shard group `group`, None for nobody to share with; `label` is the parameter group's.

    Collective over the group the first time: its ranks have to meet. Reductions run on `reduce_group` if there is one.

    Raises:
        RuntimeError: with the label, if they do not meet.
    """
    if group is None or group.size() == 1:
        return Transports(None, None)

    def transport(group: dist.ProcessGroup, comm: object | None, rounding: str | None) -> Transport:
        if comm is not None:
            return CustomTransport(group, device, all_gather, reduce_scatter)
        try:
            chosen = transport_for(group, device)
        except (OSError, RuntimeError) as error:  # a peer that does not come is a timeout, of a socket or of gloo
            raise RuntimeError(f"{label}: set-up failed (meeting the other ranks of its group): {error}") from error
        return chosen if compression is None or rounding is None else compressing(chosen, compression)

    policy = compression or CompressionPolicy()
    return Transports(
        gather=transport(group, all_gather, policy.gather),
        reduce=transport(reduce_group or group, reduce_scatter, policy.reduce),
    )
