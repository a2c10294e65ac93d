"""Profiler ranges that carry an FQN, and cost one attribute test when no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

__all__ = ["profiler_range"]

_NOTHING: AbstractContextManager[None] = nullcontext()


def profiler_range(what: str, fqn: str) -> AbstractContextManager[object]:
    """A `record_function` range named "shardkit::<what> (<fqn>)" while a profiler runs, else nothing."""
    if getattr(profiler, "_is_profiler_enabled", False):
        return torch.profiler.record_function(f"shardkit::{what} ({fqn})")
    return _NOTHING
