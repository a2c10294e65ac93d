"""Says once, at the first forward of a sharded model, that this engine runs and for how many parameters."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import nn

from shardkit.core import events
from shardkit.core.engine.step import state_of
from shardkit.core.version import __version__

__all__ = ["RECORDS", "announce_first_step"]

RECORDS = "SHARDKIT_RUN_RECORDS"
"""Environment variable with a directory: each process in which the engine runs leaves a file there."""


def announce_first_step(*, quiet: bool) -> Callable[[], None]:
    """Installs a listener for the first root; returns the function that removes it.

    Rank 0 writes one line to stderr, unless `quiet`. Every process leaves a file in the directory of `RECORDS`.
    """

    def listener(event: events.Event) -> None:
        if isinstance(event, events.RootReady):
            subscription.close()
            _record()
            if not quiet and dist.get_rank() == 0:
                sys.stderr.write(f"{_line(event.module)}\n")
                sys.stderr.flush()

    subscription = events.subscribe(listener)
    return subscription.close


def _record() -> None:
    directory = os.environ.get(RECORDS)
    if directory and Path(directory).is_dir():
        Path(directory, str(os.getpid())).touch()


def _line(root: nn.Module) -> str:
    states = dict.fromkeys(state for module in root.modules() if (state := state_of(module)) is not None)
    groups = dict.fromkeys(group for state in states for group in state.groups)
    numel = sum(param.shape.numel() for group in groups for param in group.params)
    return (
        f"shardkit {__version__} runs {type(root).__name__}: {numel:,} parameters in {len(groups)} groups, "
        f"{dist.get_world_size()} ranks"
    )
