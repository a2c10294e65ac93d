"""What a simulated rank did in one iteration, in order: operators, and communication with the places it is waited for.

The trace knows no times: `timeline.replay` gives it those of a machine. A search makes millions of steps, so they are
structs, which cost a third of what dataclasses do, and which the collector of cycles passes over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
import torch
import torch.distributed as dist

from shardkit.core.tensors import tensors_in
from shardkit.tools.torch_compat import count_flops

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


class Neighbourhood(NamedTuple):
    """A process group as this rank sees it: its ranks and hosts, and which places are other ranks of this host."""

    ranks: int
    hosts: int
    local: frozenset[int]


@lru_cache(maxsize=256)
def neighbourhood(group: dist.ProcessGroup, ranks_per_host: int) -> Neighbourhood:
    """Which ranks of a group share this rank's host, where hosts hold consecutive ranks."""
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
    hosts = [rank // ranks_per_host for rank in ranks]
    local = {i for i, rank in enumerate(ranks) if hosts[i] == own // ranks_per_host and rank != own}
    return Neighbourhood(len(ranks), len(set(hosts)), frozenset(local))


class TensorSpec(NamedTuple):
    """All that the time of an operator depends on in a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


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


class Operators:
    """Every operator call that was seen: equal calls are one object."""

    def __init__(self) -> None:
        self._known: dict[Any, Operator] = {}

    def of(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Operator:
        """The operator of a call that has returned `out`."""
        specs, named = _spec(args), _spec(kwargs)
        key = function, specs, named
        operator = self._known.get(key)
        if operator is None:
            tensors = tensors_in((args, kwargs))
            dtype = tensors[0].dtype if tensors else None
            moved = 0 if function.is_view else sum(map(_nbytes, (*tensors, *tensors_in(out))))
            flops = count_flops(function, args, kwargs, out)
            operator = Operator(function, specs, dict(named), dtype, flops, moved, "attention" in str(function))
            self._known[key] = operator
        return operator


def _nbytes(tensor: torch.Tensor) -> int:
    # An expanded tensor is read again and again from the same few bytes.
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _spec(value: Any) -> Any:
    """A hashable picture of arguments."""
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_spec, value))
    if isinstance(value, dict):
        return tuple((name, _spec(one)) for name, one in value.items())
    return "generator" if isinstance(value, torch.Generator) else value


class Ran(msgspec.Struct, frozen=True, gc=False):
    operator: Operator
    fqn: str
    phase: str


class Dispatched(msgspec.Struct, frozen=True, gc=False):
    """An operator on so many DTensors was taken apart; those on plain tensors that it runs come as `Ran`."""

    tensors: int
    fqn: str
    phase: str


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """A communication of this rank began, among so many ranks on so many hosts.

    Attributes:
        fqn: the parameter group's label, or the module that ran for communication of the model's own.
        phase: forward, backward, optimizer or between.
        bytes: of the full tensors that are gathered or reduced.
        wire_bytes: what this rank sends; `inside` of them to ranks of its own host, the others between hosts.
        dtype: on the wire.
        of_core: whether `fully_shard` made it.
        compressed: whether a `CompressionPolicy` rounds what travels.
        group: name of the process group; on a GPU its collectives run one after the other.
        about: a number that tells it from the others.
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
    about: int = 0

    @property
    def moved(self) -> int:
        """`bytes` as they travel: fewer if they are rounded for the way."""
        return self.wire_bytes * self.ranks // max(1, self.ranks - 1) if self.compressed else self.bytes


class Awaited(msgspec.Struct, frozen=True, gc=False):
    """From here on the rank needs what the communication with a number brings."""

    about: int
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

    about: Held
    nbytes: int
    fqn: str
    phase: str


class Entered(msgspec.Struct, frozen=True, gc=False):
    """Forward, backward or the optimizer comes to a repeated block; -1 for what is outside of blocks."""

    block: int


def block_of(fqn: str, prefix: str) -> int:
    """The repeated block that a name is in, if names in blocks begin with `prefix` and a number; -1 for none."""
    number = fqn[len(prefix) :].partition(".")[0] if fqn.startswith(prefix) else ""
    return int(number) if number.isdigit() else -1


Step: TypeAlias = Ran | Dispatched | Transfer | Awaited | Changed | Entered


@dataclass
class Trace:
    """The steps of one iteration, and what was held with how many bytes before it."""

    steps: list[Step] = field(default_factory=list)
    held: list[tuple[Held, int]] = field(default_factory=list)

    @property
    def transfers(self) -> list[Transfer]:
        return [step for step in self.steps if isinstance(step, Transfer)]
