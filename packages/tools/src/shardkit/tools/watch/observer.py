"""Watching from outside: `SHARDKIT_WATCH=1` in the environment of every rank.

SHARDKIT_WATCH_SECONDS    how long a wait may take before the ranks report (default 60)
"""

from __future__ import annotations

import atexit
import os

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardkit.core import events
from shardkit.tools.torch_compat import own_store_connection
from shardkit.tools.watch.watcher import Watcher

__all__ = ["DEFAULT_SECONDS", "SECONDS", "SWITCH", "parse_seconds", "start"]

SWITCH = "SHARDKIT_WATCH"
SECONDS = "SHARDKIT_WATCH_SECONDS"
DEFAULT_SECONDS = 60.0


def start() -> None:
    """Begins to watch this process. Does nothing without a process group of several ranks.

    Raises:
        ValueError: for a limit that is no positive number.
    """
    limit = parse_seconds(os.environ.get(SECONDS, str(DEFAULT_SECONDS)))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = own_store_connection("shardkit_watch")
    watcher = Watcher(store, dist.get_rank(), dist.get_world_size(), limit)
    watcher.begin()
    atexit.register(watcher.end)  # before the interpreter goes, under a thread that is in the store
    events.subscribe(watcher.witness.hear)
    register_optimizer_step_pre_hook(watcher.witness.before_step)
    register_optimizer_step_post_hook(watcher.witness.after_step)


def parse_seconds(text: str) -> float:
    """The limit that a user wrote. Raises `ValueError` if it is no positive number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{SECONDS} is '{text}'; expected a positive number of seconds")
    return seconds
