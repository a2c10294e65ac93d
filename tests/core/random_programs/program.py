"""Training programs as data: the operations of the modules, how they are sharded, and the training loop.

Everything prints as the code that makes it, with defaults left out, so a counterexample can be pasted into a test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

# The parameters that each operation reads.
PARAMETERS = {
    "linear": ("linear_w",),
    "bias": ("bias_w",),
    "add_bias_": ("bias_w",),
    "scale": ("scale_w",),
    "gain": ("gain_w",),
    "mlp": ("mlp_up", "mlp_down"),
    "table": ("table_w",),
    "spare": ("spare_w",),
}


class _Data:
    """A dataclass whose repr leaves out the fields that have their default."""

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default or type(value) is not type(field.default):
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Call(_Data):
    """Calls a child. ``use`` says how the output is used, ``checkpoint`` is "reentrant", "plain" or None."""

    name: str
    use: str = "first"
    checkpoint: str | None = None
    no_grad: bool = False
    keyword: bool = False


@dataclass(frozen=True, repr=False)
class Side(_Data):
    """Keeps a loss aside. ``of`` is "router", "weight" or "x"; ``place`` is where it is kept."""

    of: str = "router"
    place: str = "attribute"


Op = str | Call | Side


@dataclass(frozen=True, repr=False)
class Block(_Data):
    """A module: ``ops`` change its input one after the other; ``blocks`` are its children.

    ``same`` is the path of another block whose module this child shares. ``form`` is the container of the output,
    ``extra`` a second output. ``frozen`` and ``float32`` name parameters.
    """

    name: str = ""
    ops: tuple[Op, ...] = ()
    blocks: tuple[Block, ...] = ()
    form: str = "tensor"
    extra: str | None = None
    hooks: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    same: str = ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its own parameters, in order of first use."""
        names: list[str] = []
        for op in self.ops:
            if isinstance(op, str):
                names += PARAMETERS.get(op, ())
            elif isinstance(op, Side) and op.of != "x":
                names.append("router_w" if op.of == "router" else "linear_w")
        if self.extra in ("weight", "weight_view"):
            names.append("linear_w")
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True, repr=False)
class Wrap(_Data):
    """One call of ``fully_shard``: on the module at the one path, or on the list of modules at several."""

    paths: tuple[str, ...]
    reshard: bool | int | None = None


@dataclass(frozen=True, repr=False)
class Policy(_Data):
    """How the model is sharded. ``late`` is a rank that sends its shards late.

    ``dim_1``: parameters with a dim 1 are sharded on it. ``buffers``: how many groups' gradients are reduced at once.
    ``reset``: whether ``reset_iter_state`` follows the user's exceptions.
    """

    world: int = 2
    shared_memory: bool = False
    wraps: tuple[Wrap, ...] = (Wrap(("",)),)
    depth: int | None = None
    budget: int | None = None
    lists: str | None = None
    late: int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    reshard_after_backward: bool = True
    dim_1: bool = False
    hsdp: bool = False
    hooks_first: bool = True
    buffers: int = 1
    reset: bool = True


@dataclass(frozen=True, repr=False)
class Act(_Data):
    """Something done to the model: "unshard", "unshard_async", "reshard", "state_dict", or a forward of some kind.

    "moved" puts all tensors into other memory, as `model.to(device)` does.
    """

    kind: str
    path: str = ""


@dataclass(frozen=True, repr=False)
class Micro(_Data):
    """Forwards and backwards over one micro-batch.

    ``order``: "together" (one backward of the sum), "each" or "reversed" (one each). ``sides``: how side outputs enter:
    "sum", "first" or "last" (a backward of their own, before or after), "only", "drop". ``twice``: every backward runs
    twice. ``by``: "backward", "inputs" (torch.autograd.grad for the inputs alone) or "penalty" (of their gradient).
    ``change``: operations on the output. ``fail``: where the user's code raises, at a "trap".
    """

    forwards: int = 1
    order: str = "together"
    sides: str = "sum"
    twice: bool = False
    by: str = "backward"
    inputs: bool = False
    change: tuple[str, ...] = ()
    before: tuple[Act, ...] = ()
    between: tuple[Act, ...] = ()
    fail: str | None = None
    sync: bool = True


@dataclass(frozen=True, repr=False)
class Step(_Data):
    """Micro-batches, then perhaps a step of SGD and a ``zero_grad`` ("none" sets to None, "zero" fills, "keep").

    ``toggle`` names parameters that are frozen before the step, or trained again. ``clip``: gradients are clipped.
    ``synchronize``: no micro-batch reduces gradients, `synchronize_gradients` does.
    """

    micros: tuple[Micro, ...] = (Micro(),)
    update: bool = True
    zero: str = "none"
    toggle: tuple[str, ...] = ()
    clip: bool = False
    synchronize: bool = False


@dataclass(frozen=True, repr=False)
class Program(_Data):
    """A model (``root``), ties (names of two parameters each), a policy, and the steps of a training loop."""

    root: Block
    policy: Policy = Policy()
    steps: tuple[Step, ...] = (Step(), Step())
    ties: tuple[tuple[str, str], ...] = ()
    dtype: str = "float64"

    @property
    def width(self) -> int:
        """Features. A matrix of that width takes more than a kilobyte: see `start_server` in pool.py."""
        return 12 if self.dtype == "float64" else 17


def blocks_of(block: Block, path: str = "") -> Iterator[tuple[str, Block]]:
    """Every block with its path, parents first; not those that are another's module."""
    yield path, block
    for child in block.blocks:
        if not child.same:
            yield from blocks_of(child, f"{path}.{child.name}" if path else child.name)


def parameter_names(root: Block) -> list[str]:
    """The names of all parameters, ties not taken out."""
    return [f"{path}.{name}" if path else name for path, block in blocks_of(root) for name in block.parameters]
