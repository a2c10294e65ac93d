"""A way for bytes not to move: transports that stand in for the real ones, for simulation.

A simulator runs a model on one process, with a fake process group, and has to see the plans, the memory and the events
that a network would have made. So it brings transports with the properties of the ones it stands in for, and their
programs, which then need not copy anything. `stand_ins` puts them in the place of all others.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from shardkit.core.runtime.program import Program
from shardkit.core.runtime.transport.interface import Transport

if TYPE_CHECKING:
    from shardkit.core.runtime.plan import GatherPlan, ReducePlan


class StandIn(Transport):
    """A transport that brings its programs along, in place of those of `runtime.gather` and `runtime.reduce`."""

    @abstractmethod
    def gather_program(
        self, plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]
    ) -> Program:
        """What `runtime.gather.gather` is to return."""

    @abstractmethod
    def reduce_program(self, plan: ReducePlan, grads: list[torch.Tensor], output: torch.Tensor) -> Program:
        """What `runtime.reduce.reduce_scatter` is to return."""


Choice: TypeAlias = Callable[[dist.ProcessGroup, torch.device], StandIn]

_choice: Choice | None = None


def chosen_stand_in(group: dist.ProcessGroup, device: torch.device) -> StandIn | None:
    """The transport that stands in for this group's own, None where nobody simulates."""
    return None if _choice is None else _choice(group, device)


@contextlib.contextmanager
def stand_ins(choice: Choice) -> Iterator[None]:
    """Within this context parameter groups that need a transport get the one that `choice` gives them.

    A group of parameters asks once, so models are to be sharded and dropped inside it.
    """
    global _choice  # noqa: PLW0603 - one simulation a process, as one default process group
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before
