"""What a lane runs: a communication written as a generator, so that one body serves CPU and streams."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import Any, Protocol, TypeAlias

import torch


class Waitable(Protocol):
    """What a program waits on: c10d's works, and postings of the shared-memory transport."""

    def wait(self) -> Any:
        """Return when it is done; raise if it failed."""


Program: TypeAlias = Generator[Sequence[Waitable], None, None]
"""Launches communication, yields the works it waits on, continues with local work once they are done, may launch and
yield again, then returns. Programs compose with `yield from`."""


class _NextStage(tuple[Waitable, ...]):
    """Nothing to wait for, told from other empty tuples by identity."""

    __slots__ = ()


NEXT_STAGE: Sequence[Waitable] = _NextStage()
"""Yielded where a program has no more use for what its caller gave it: what comes next, such as the
all-reduce of a reduced shard, need not hold up the next program of the same lane."""


class _Holding(threading.local):
    """The list that keeps tensors for the program which runs on this thread right now, if its lane needs one."""

    tensors: list[torch.Tensor] | None = None


_holding = _Holding()


def hold(*tensors: torch.Tensor) -> None:
    """Called by a program: keep `tensors` until its ticket has been waited for.

    A stream lane runs a program to its end while the device has hardly begun. A buffer that belonged only to the
    program's frame would go back to the allocator, and to the compute stream, while it is still being written.
    On a CPU lane a frame outlives its transfers and nothing needs to be held.
    """
    if _holding.tensors is not None:
        _holding.tensors.extend(tensors)


class Holder:
    """Collects in `tensors` what programs `hold` inside the `with` block."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._outer: list[torch.Tensor] | None = None

    def __enter__(self) -> None:
        self._outer, _holding.tensors = _holding.tensors, self._tensors

    def __exit__(self, *exc_info: object) -> None:
        _holding.tensors = self._outer
