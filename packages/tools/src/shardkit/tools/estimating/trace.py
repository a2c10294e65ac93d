"""What a simulated rank did in one iteration, in order: operators, and communication with the places it is waited for.

The trace knows no times: `timeline.replay` gives it those of a machine. A search makes millions of steps, so they are
structs, which cost a third of what dataclasses do, and which the collector of cycles passes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardkit.tools.torch_compat import count_flops, is_view

Collective: TypeAlias = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "other"]

Category: TypeAlias = Literal[
    "sharded_parameters",
    "unsharded_parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "inputs",
    "other",
]
"""Of memory, in the order of tables and charts."""
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True)
class Transfer:
    """One communication of this rank.

    Attributes:
        collective: what kind it is.
        fqn: the parameter group's label, or the module that ran for communication of the model's own.
        phase: forward, backward, optimizer or between.
        bytes: of the full tensors that are gathered or reduced.
        wire_bytes: what this rank sends; `inside` of them to ranks of its own host, the others between hosts.
        dtype: on the wire.
        ranks: how many take part.
        hosts: how many hosts they are on.
        of_core: whether `fully_shard` made it.
        compressed: whether a `CompressionPolicy` rounds what travels.
        group: name of the process group; on a GPU its collectives run one after the other.
    """

    collective: Collective
    fqn: str
    phase: str
    bytes: int
    wire_bytes: int
    inside: int
    dtype: torch.dtype
    ranks: int
    hosts: int
    of_core: bool
    compressed: bool = False
    group: str = ""

    @property
    def moved(self) -> int:
        """`bytes` as they travel: fewer if they are rounded for the way."""
        if not self.compressed:
            return self.bytes
        return self.wire_bytes * self.ranks // max(1, self.ranks - 1)

    @property
    def between(self) -> int:
        """Bytes that this rank sends to other hosts."""
        return self.wire_bytes - self.inside


@dataclass(frozen=True)
class Neighbourhood:
    """The ranks of a process group, as this rank sees them.

    Attributes:
        ranks: how many there are.
        local: which places in the group are other ranks of this rank's host.
        hosts: how many hosts they are on.
    """

    ranks: int
    local: frozenset[int]
    hosts: int

    @property
    def local_share(self) -> float:
        """The part of this rank's peers that are on its host."""
        return len(self.local) / max(1, self.ranks - 1)

    def inside(self, to_peers: Sequence[int]) -> int:
        """What stays inside the host of the bytes that go to each place of the group."""
        return sum(to_peers[place] for place in self.local)


@lru_cache(maxsize=256)
def neighbourhood(group: dist.ProcessGroup, ranks_per_host: int) -> Neighbourhood:
    """Which ranks of a group share this rank's host, where hosts hold consecutive ranks."""
    ranks = dist.get_process_group_ranks(group)
    here, own = dist.get_rank() // ranks_per_host, dist.get_rank()
    local = frozenset(i for i, rank in enumerate(ranks) if rank // ranks_per_host == here and rank != own)
    return Neighbourhood(len(ranks), local, len({rank // ranks_per_host for rank in ranks}))


TensorSpec: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype."""


@dataclass(frozen=True, eq=False)
class Operator:
    """One way that an operator was called.

    Attributes:
        function: the overload.
        args, kwargs: as it was called, with a `TensorSpec` in the place of each tensor.
        dtype: of its first tensor, None if it has none.
        flops: of matrix products and convolutions, 0 for everything else.
        bytes: that it reads and writes; 0 for one that only makes views.
        attention: whether it is fused attention, forward or backward.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype | None
    flops: int
    bytes: int
    attention: bool = False


class Ran(msgspec.Struct, frozen=True, gc=False):
    """An operator ran in a module."""

    operator: Operator
    fqn: str
    phase: str


class Dispatched(msgspec.Struct, frozen=True, gc=False):
    """An operator on so many DTensors was taken apart; those on plain tensors that it runs come as `Ran`."""

    tensors: int
    fqn: str
    phase: str


class Launched(msgspec.Struct, frozen=True, gc=False):
    """A communication began; `number` tells it from the others."""

    number: int
    transfer: Transfer


class Awaited(msgspec.Struct, frozen=True, gc=False):
    """From here on the rank needs what a communication brings."""

    number: int
    fqn: str
    phase: str


class Held(msgspec.Struct, eq=False, gc=False):
    """A storage.

    Attributes:
        category: what it turned out to be.
        block: of parameters, gradients and optimizer state: the repeated block (`repetition`) that they belong to, -1
            for what is outside of blocks. None for everything else.
    """

    category: Category
    block: int | None = None


class Changed(msgspec.Struct, frozen=True, gc=False):
    """A storage has `nbytes` from here on: it was allocated, resized, or freed."""

    held: Held
    nbytes: int
    fqn: str
    phase: str


class Entered(msgspec.Struct, frozen=True, gc=False):
    """Forward, backward or the optimizer comes to a repeated block; -1 for what is outside of blocks."""

    block: int


Step: TypeAlias = Ran | Dispatched | Launched | Awaited | Changed | Entered


@dataclass
class Trace:
    """The steps of one iteration, and what was held with how many bytes before it."""

    steps: list[Step] = field(default_factory=list)
    held: list[tuple[Held, int]] = field(default_factory=list)

    @property
    def transfers(self) -> list[Transfer]:
        """Every communication, in order."""
        return [step.transfer for step in self.steps if isinstance(step, Launched)]

    @property
    def operators(self) -> dict[Operator, int]:
        """Every way that an operator was called, and how often."""
        counts: dict[Operator, int] = {}
        for step in self.steps:
            if isinstance(step, Ran):
                counts[step.operator] = counts.get(step.operator, 0) + 1
        return counts


class Operators:
    """Every operator call that was seen: equal calls are one object."""

    def __init__(self) -> None:
        self._known: dict[Any, Operator] = {}

    def of(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Operator:
        """The operator of a call that has returned `out`."""
        specs = _spec(args)
        named = _spec(kwargs)
        key = (function, specs, named)
        operator = self._known.get(key)
        if operator is None:
            operator = self._known[key] = _operator(function, specs, dict(named), args, kwargs, out)
        return operator


def _operator(
    function: Any, specs: Any, named: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Operator:
    tensors = list(_tensors((*args, *kwargs.values())))
    moved = 0 if is_view(function) else sum(map(_nbytes, (*tensors, *_tensors((out,)))))
    return Operator(
        function=function,
        args=specs,
        kwargs=named,
        dtype=tensors[0].dtype if tensors else None,
        flops=count_flops(function, args, kwargs, out),
        bytes=moved,
        attention="attention" in str(function),
    )


def _nbytes(tensor: torch.Tensor) -> int:
    # An expanded tensor is read again and again from the same few bytes.
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _tensors(values: Sequence[Any]) -> Sequence[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def dtensors_among(values: Sequence[Any]) -> int:
    """How many DTensors an operator is given, in lists too."""
    return sum(
        dtensors_among(value) if isinstance(value, list | tuple) else isinstance(value, DTensor) for value in values
    )


def _spec(value: Any) -> Any:
    """A hashable picture of arguments."""
    if isinstance(value, torch.Tensor):
        return TensorPicture((tuple(value.shape), value.stride(), value.dtype))
    if isinstance(value, list | tuple):
        return tuple(map(_spec, value))
    if isinstance(value, dict):
        return tuple((name, _spec(one)) for name, one in value.items())
    if isinstance(value, torch.Generator):
        return "generator"
    return value


class TensorPicture(tuple[tuple[int, ...], tuple[int, ...], torch.dtype]):
    """A `TensorSpec` that is told from other tuples by its class."""

    __slots__ = ()
