"""SHARDKIT_DEBUG=order: finds ranks that run their groups in different orders, and reports each rank's order.

Before each gather, reduce-scatter and all-reduce the ranks of its group exchange a hash of everything that they have
run on that group so far. If the hashes differ, they exchange and compare their last entries. This costs one small
collective for each collective. On CPU it also removes the overlap of gathers and reductions: a rank that runs fewer
groups may wait for its peers' part in earlier operations, so a rank completes all of these before the exchange
(`CommContext.catch_up`).
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core import events

_SHOWN = 8


def wanted_checks() -> tuple[bool, int | None]:
    """The checks in SHARDKIT_DEBUG: whether that of the order, and after how many forwards replicas are compared again.

    Its words, joined by commas, are "order", and "replicas" for a comparison in each forward, or "replicas=100". The
    number is None if only the first forward compares them.
    """
    words = os.environ.get("SHARDKIT_DEBUG", "").split(",")
    for word in words:
        name, _, every = word.partition("=")
        if name == "replicas":
            if every and (not every.isdecimal() or int(every) < 1):
                raise ValueError(f"SHARDKIT_DEBUG has {word!r}; expected replicas, or replicas=100 for every 100th")
            return "order" in words, int(every or 1)
    return "order" in words, None


def agree(digest: bytes, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of `group` passed the same digest (collective; 16 bytes on the wire).

    One all-reduce: the maxima of a value and of its negation cancel only if all values are equal.
    """
    if dist.get_backend(group) == "fake":  # all its ranks are this one
        return True
    value = int.from_bytes(hashlib.blake2b(digest, digest_size=7).digest(), "big")
    pair = torch.tensor([value, -value], dtype=torch.int64, device=device)
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    high, low = pair.tolist()
    return bool(high == -low)


class OrderCheck:
    """The running hash of each process group that a root's groups communicate on."""

    def __init__(self) -> None:
        self._hashes: dict[dist.ProcessGroup, Any] = {}
        self._history: dict[dist.ProcessGroup, deque[str]] = {}

    def record(self, what: str, label: str, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Call before a group runs a collective (itself a collective over `group`).

        Raises:
            RuntimeError: on every rank of `group` if the ranks have not all run the same so far; on this rank if a peer
                does not come to its next collective, because it has ended or runs no further groups.
        """
        if group is None or group.size() == 1:
            return
        running = self._hashes.setdefault(group, hashlib.blake2b())
        history = self._history.setdefault(group, deque(maxlen=_SHOWN))
        entry = f"{what} of '{label}'"
        running.update(entry.encode())
        history.append(entry)
        try:
            with events.waiting(label, "order check"):
                agreed = agree(running.digest(), group, device)
        except RuntimeError as error:
            raise RuntimeError(
                f"SHARDKIT_DEBUG=order: this rank reached {entry}, but a peer did not reach its next collective "
                f"on the same process group ({error}). Last {_SHOWN} of this rank, newest last: {' -> '.join(history)}"
                ". Compare with the peer's own message or log"
            ) from error
        if agreed:
            return
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, list(history), group=group)
        ranks = dist.get_process_group_ranks(group)
        report = "\n".join(f"  rank {rank}: {' -> '.join(seen)}" for rank, seen in zip(ranks, everyone, strict=True))
        raise RuntimeError(
            f"SHARDKIT_DEBUG=order: the ranks run their groups in different orders. Last {_SHOWN} of each rank, newest "
            f"last:\n{report}\nMake every rank call the same modules in the same order, or give unused branches a zero "
            "weight instead of skipping them"
        )
