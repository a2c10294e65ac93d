"""Moves a tensor's elements from one distribution over ranks to another, in one exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardkit.legacy_fsdp_compat.flat_layout import Interval, intersection

__all__ = ["reshuffle"]


def reshuffle(
    piece: torch.Tensor, held: Sequence[Interval], wanted: Sequence[Interval], group: dist.ProcessGroup
) -> torch.Tensor:
    """The elements `wanted[rank]` of a tensor; each rank passes its elements `held[rank]` (collective over `group`).

    Example: rank 0 of two holds (0, 6) and rank 1 (6, 8); wanted are (0, 4) and (4, 8): rank 0 sends its last two.

    Args:
        piece: this rank's elements, 1-D and contiguous.
        held: intervals of all ranks of the group; in rank order they cover the whole tensor without overlap.
        wanted: intervals of all ranks; they may overlap.
        group: the process group.

    Returns:
        A new 1-D tensor of the same dtype on the same device.
    """
    rank = group.rank()
    own = held[rank]
    outgoing = [intersection(own, want) for want in wanted]
    incoming = [intersection(have, wanted[rank]) for have in held]
    size = piece.element_size()
    chunks = [piece[low - own[0] : high - own[0]] for low, high in outgoing]
    result = piece.new_empty(sum(high - low for low, high in incoming))
    sent = torch.cat(chunks) if chunks else piece[:0]
    if group.size() == 1:
        return sent
    dist.all_to_all_single(
        result.view(torch.uint8),
        sent.view(torch.uint8),
        [(high - low) * size for low, high in incoming],
        [(high - low) * size for low, high in outgoing],
        group=group,
    )
    return result
