"""What a rank writes down while it is profiled: core's events and a few of our own, each with its time.

Writing is all that happens during training; `replay.py` makes sense of the entries afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from shardkit.core.events import Event

__all__ = [
    "ActivationDropped",
    "ActivationSaved",
    "Entry",
    "GradientAccumulated",
    "GradientsKept",
    "HeldBytes",
    "OptimizerBegan",
    "OptimizerEnded",
    "ResidentBytes",
]


@dataclass(frozen=True, slots=True)
class OptimizerBegan:
    """An optimizer's step begins."""


@dataclass(frozen=True, slots=True)
class OptimizerEnded:
    """An optimizer's step has ended."""


@dataclass(frozen=True, slots=True)
class ActivationSaved:
    """Autograd keeps a storage of so many bytes that it did not keep before, and that is no parameter's."""

    key: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ActivationDropped:
    """The memory of that storage is free again."""

    key: int


@dataclass(frozen=True, slots=True)
class GradientAccumulated:
    """Backward has put a gradient of so many bytes on the unsharded parameter `fqn`, or added to the one there."""

    fqn: str
    bytes: int


@dataclass(frozen=True, slots=True)
class GradientsKept:
    """After a backward: the parameters that still have an unsharded gradient, as no reduction has taken it."""

    fqns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """This rank's tensors of one category, counted: sharded parameters, sharded gradients, optimizer state, buffers."""

    category: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ResidentBytes:
    """What the process holds as the system, or the device's allocator, counts it."""

    bytes: int


Entry: TypeAlias = (
    Event
    | OptimizerBegan
    | OptimizerEnded
    | ActivationSaved
    | ActivationDropped
    | GradientAccumulated
    | GradientsKept
    | HeldBytes
    | ResidentBytes
)
