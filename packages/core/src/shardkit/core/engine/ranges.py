"""The surroundings of a group's work: no autograd, and profiler ranges that carry an FQN."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.autograd import profiler

from shardkit.core.torch_compat import set_grad_enabled

__all__ = ["ungraphed"]


class ungraphed:  # noqa: N801 - a context manager, like torch.no_grad
    """Runs a block without autograd, in a range "shardkit::<what> (<fqn>)" while a profiler runs.

    It replaces `torch.no_grad()`, which costs three times the host time, because groups enter it several times a step.
    """

    def __init__(self, what: str, fqn: str) -> None:
        self._range: Any = None
        if getattr(profiler, "_is_profiler_enabled", False):
            self._range = torch.profiler.record_function(f"shardkit::{what} ({fqn})")

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()
        self._before = torch.is_grad_enabled()
        set_grad_enabled(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_grad_enabled(self._before)
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)
