"""SHARDKIT_DEBUG=order: finds ranks that run their groups in different orders, and reports each rank's order.

Before each gather, reduce-scatter and all-reduce the ranks of its group exchange a hash of everything that they have
run on that group so far; if the hashes differ, their last entries. On CPU this removes the overlap of gathers and
reductions: a rank that runs fewer groups may wait for its peers' part in earlier operations, so a rank completes all of
these before the exchange (`CommContext.catch_up`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core import events
from shardkit.core.runtime.collective import agree

_SHOWN = 8


class OrderCheck:
    """The running hash of each process group that a root's groups communicate on."""

    def __init__(self) -> None:
        self._hashes: dict[dist.ProcessGroup, Any] = {}
        self._history: dict[dist.ProcessGroup, deque[str]] = {}

    def record(self, what: str, label: str, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Call before a group runs a collective (itself a collective over `group`).

        Raises RuntimeError on every rank if they have not all run the same so far; here if a peer does not come.
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
