"""The steps of a simulated rank in one iteration: operators, and communication with the places that wait for it.

The trace has no times: `timeline.replay` adds those of a machine. A search creates millions of steps, so they are
structs, which cost a third of dataclasses and are not tracked by the garbage collector.
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
    """A process group as seen by this rank: its ranks and hosts, and which places are other ranks of this host."""

    ranks: int
    hosts: int
    local: frozenset[int]


@lru_cache(maxsize=256)
def neighbourhood(group: dist.ProcessGroup, ranks_per_host: int) -> Neighbourhood:
    """The neighbourhood of this rank in a group, if hosts hold consecutive ranks."""
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
    hosts = [rank // ranks_per_host for rank in ranks]
    local = {i for i, rank in enumerate(ranks) if hosts[i] == own // ranks_per_host and rank != own}
    return Neighbourhood(len(ranks), len(set(hosts)), frozenset(local))


class TensorSpec(NamedTuple):
    """The properties of a tensor that determine the time of an operator."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Operator:
    """One distinct call of an operator.

    Attributes:
        function: the overload.
        args, kwargs: its arguments, with a `TensorSpec` in place of each tensor.
        dtype: dtype of its first tensor, None if it has none.
        flops: floating-point operations of matrix products and convolutions, 0 for everything else.
        bytes: bytes read and written, also in place; 0 if it only makes views.
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
    """All distinct operator calls: equal calls share one object."""

    def __init__(self) -> None:
        self._known: dict[Any, Operator] = {}

    def of(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Operator:
        """The operator of a call that returned `out`."""
        specs, named = _spec(args), _spec(kwargs)
        key = function, specs, named
        operator = self._known.get(key)
        if operator is None:
            tensors = tensors_in((args, kwargs))
            dtype = tensors[0].dtype if tensors else None
            written = [one for one in tensors_in(out) if isinstance(one, torch.Tensor)] or _written(function, args)
            moved = 0 if function.is_view else sum(map(_nbytes, (*tensors, *written)))
            flops = count_flops(function, args, kwargs, out)
            operator = Operator(function, specs, dict(named), dtype, flops, moved, "attention" in str(function))
            self._known[key] = operator
        return operator


def _nbytes(tensor: torch.Tensor) -> int:
    # An expanded tensor is read repeatedly from the same few bytes.
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _written(function: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that an operator without results, such as a fused optimizer, writes to."""
    wanted = function._schema.arguments
    return tensors_in([one for one, of in zip(args, wanted, strict=False) if of.is_write])


def _spec(value: Any) -> Any:
    """A hashable description of arguments."""
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_spec, value))
    if isinstance(value, dict):
        return tuple((name, _spec(one)) for name, one in value.items())
    return "generator" if isinstance(value, torch.Generator) else value


class Ran(msgspec.Struct, frozen=True, gc=False):
    """An operator ran; with `on_host`, beside a device, on tensors that `CPUOffloadPolicy` keeps in host memory."""

    operator: Operator
    fqn: str
    phase: str
    on_host: bool = False


class Dispatched(msgspec.Struct, frozen=True, gc=False):
    """An operator on this many DTensors was dispatched; the operators that it runs on plain tensors follow as `Ran`."""

    tensors: int
    fqn: str
    phase: str


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """A communication of this rank began, among this many ranks on this many hosts.

    Attributes:
        fqn: the parameter group's label; for the model's own communication, the running module.
        phase: forward, backward, optimizer or between.
        bytes: bytes of the full tensors that are gathered or reduced.
        wire_bytes: bytes that this rank sends; `inside` of them to ranks of its own host, the others between hosts.
        dtype: dtype on the wire.
        of_core: whether `fully_shard` started it.
        compressed: whether a `CompressionPolicy` rounds the data.
        group: name of the process group; on a GPU its collectives run one after the other.
        copied: bytes that go from the host to the device before it, or come back after it.
        about: a unique number.
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
    copied: int = 0
    about: int = 0

    @property
    def moved(self) -> int:
        """`bytes` as sent: fewer if they are rounded."""
        return self.wire_bytes * self.ranks // max(1, self.ranks - 1) if self.compressed else self.bytes


class Copied(msgspec.Struct, frozen=True, gc=False):
    """A copy of activations to the host or back began; `about` is a unique number, as of a communication."""

    to_host: bool
    nbytes: int
    fqn: str
    phase: str
    about: int


class Awaited(msgspec.Struct, frozen=True, gc=False):
    """From here on the rank needs the result of the communication with a number."""

    about: int
    fqn: str
    phase: str


class Held(msgspec.Struct, eq=False, gc=False):
    """A storage.

    Attributes:
        category: its final category.
        block: for parameters, gradients and optimizer state, the repeated block (`repetition`) that they belong to, or
            -1 outside of blocks. None for everything else.
        host: whether `CPUOffloadPolicy` keeps it in host memory, beside a device.
    """

    category: Category
    block: int | None = None
    host: bool = False


class Changed(msgspec.Struct, frozen=True, gc=False):
    """The size of a storage is `nbytes` from here on: it was allocated, resized, or freed."""

    about: Held
    nbytes: int
    fqn: str
    phase: str


class Entered(msgspec.Struct, frozen=True, gc=False):
    """Forward, backward or the optimizer enters a repeated block; -1 outside of blocks."""

    block: int


def block_of(fqn: str, prefix: str) -> int:
    """The repeated block of a name, if names in blocks begin with `prefix` and a number; -1 for none."""
    number = fqn[len(prefix) :].partition(".")[0] if fqn.startswith(prefix) else ""
    return int(number) if number.isdigit() else -1


Step: TypeAlias = Ran | Dispatched | Transfer | Copied | Awaited | Changed | Entered


@dataclass
class Trace:
    """The steps of one iteration, and the storages held before it with their sizes."""

    steps: list[Step] = field(default_factory=list)
    held: list[tuple[Held, int]] = field(default_factory=list)

    @property
    def transfers(self) -> list[Transfer]:
        return [step for step in self.steps if isinstance(step, Transfer)]
