"""What one rank cannot do, all ranks hear of: no rank raises alone and leaves the others waiting."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
import torch.distributed as dist

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.peers import Peers

__all__ = ["gather_everywhere", "highest", "raise_together"]

T = TypeVar("T")


def highest(peers: Peers, values: list[int]) -> list[int]:
    """The highest of each number over the ranks (int64). Collective, one small all-reduce."""
    if peers.size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64, device=peers.device_for("cpu"))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=peers.group)
    return cast(list[int], tensor.tolist())


def gather_everywhere(peers: Peers, item: T) -> list[T]:
    """Everyone's item on every rank; for what is rare. Collective."""
    items = [item] * peers.size
    if peers.size > 1:
        dist.all_gather_object(items, item, group=peers.group)
    return items


def raise_together(peers: Peers, error: Exception | None, what: str) -> None:
    """Raises on every rank if any rank brings an error, else returns. Collective.

    Raises:
        DamagedCheckpointError: if all errors are of this kind.
        CheckpointError: else; the message says which ranks failed, and why the first did.
    """
    if highest(peers, [int(error is not None)]) == [0]:
        return
    mine = None if error is None else (isinstance(error, DamagedCheckpointError), _text(error))
    failed = {rank: one for rank, one in enumerate(gather_everywhere(peers, mine)) if one is not None}
    first = min(failed)
    ranks = "" if peers.size == 1 else f" on rank {first}" if len(failed) == 1 else f" on ranks {sorted(failed)}"
    kind = DamagedCheckpointError if all(damaged for damaged, _ in failed.values()) else CheckpointError
    raise kind(f"{what} failed{ranks}: {failed[first][1]}") from error


def _text(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename or 'while writing'})"
    return f"{type(error).__name__}: {error}"
