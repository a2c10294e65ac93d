"""Small tensor-parallel models: how to build one, make its layers tensor-parallel and cut it into units of sharding.

Between up and down the activations stay DTensors: torch takes a plain local tensor for an even shard.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from shardkit.tp_adapter import FusedColwiseParallel
from tests.support import rank_mesh
from tests.support.models import Composed
from tests.support.sharding import shard_each

BATCH, SEQUENCE = 2, 4


def chain(first: nn.Module, blocks: Callable[[], nn.Module], rest: Callable[[Any, Tensor], Tensor], **more: Any) -> Any:
    """`first`, two blocks and the rest of forward; `more` are its modules and parameters."""

    def run(model: Any, x: Tensor) -> Tensor:
        x = model.first(x)
        for block in model.blocks:
            x = block(x)
        return rest(model, x)

    return Composed(run, first=first, blocks=nn.ModuleList(blocks() for _ in range(2)), **more)


def feed(width: int, hidden: int) -> nn.Module:
    """norm, up, down; the norm can be sequence-parallel."""
    parts = {"norm": nn.LayerNorm(width), "up": nn.Linear(width, hidden), "down": nn.Linear(hidden, width)}
    return Composed(lambda m, x: x + m.down(F.gelu(m.up(m.norm(x)))), **parts)


def tensor_model(width: int = 8, hidden: int = 16) -> nn.Module:
    """Activations are whole on every rank; `scale` and the norms are plain parameters."""
    scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
    return chain(nn.Linear(6, width), lambda: feed(width, hidden), lambda m, x: x * m.scale, scale=scale)


def language_model(width: int = 8, hidden: int = 16, vocabulary: int = 12, tied: bool = False) -> nn.Module:
    """Embedding and head cut over the vocabulary, norms sequence-parallel; the head can be the embedding."""
    more = {"norm": nn.LayerNorm(width), "head": nn.Linear(width, vocabulary, bias=False), "tied": tied}
    embedding = nn.Embedding(vocabulary, width)
    return tie(chain(embedding, lambda: feed(width, hidden), lambda m, x: m.head(m.norm(x)), **more))


def tie(model: Any) -> Any:
    if getattr(model, "tied", False):
        model.head.weight = model.first.weight
    return model


TENSOR_PLAN = {
    "first": ColwiseParallel(output_layouts=Replicate()),
    "blocks.*.up": ColwiseParallel(use_local_output=False),
    "blocks.*.down": RowwiseParallel(),
}
LANGUAGE_PLAN = {
    "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
}


@dataclass(frozen=True)
class TPSpec:
    """A model, with the parts that a training loop needs."""

    build: Callable[[], nn.Module]
    plan: dict[str, Any]
    inputs: Callable[[torch.Generator], Tensor]

    def parallelize(self, model: nn.Module, tp: DeviceMesh) -> None:
        parallelize_module(model, tp, self.plan)
        tie(model)

    def loss(self, model: nn.Module, seed: int) -> Tensor:
        """The loss of the micro-batch that `seed` stands for."""
        output = model(self.inputs(torch.Generator().manual_seed(seed)))
        return (output - 0.5).square().mean()


def build(name: str) -> nn.Module:
    """A model with the weights that every rank starts from."""
    torch.manual_seed(1234)
    return SPECS[name].build()


def shard(model: nn.Module, api: Any, mesh: DeviceMesh, **options: Any) -> None:
    shard_each(*model.blocks, model, api=api, mesh=mesh, **options)


def axes(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    """The data-parallel part of a mesh over all ranks, and its last axis, which is tensor-parallel."""
    mesh = rank_mesh(shape, NAMES[len(shape)])
    return (mesh["dp"] if len(shape) == 2 else mesh["dp_replicate", "dp_shard"]), mesh["tp"]


def fused_model(fused: bool = True) -> nn.Module:
    """Blocks with gate and up in one weight, or as two layers."""

    def run(block: Any, x: Tensor) -> Tensor:
        gate, up = block.gate_up(x).chunk(2, -1) if fused else (block.gate(x), block.up(x))
        return x + block.down(F.silu(gate) * up)

    def swiglu() -> nn.Module:
        parts = {"gate_up": nn.Linear(6, 16)} if fused else {"gate": nn.Linear(6, 8), "up": nn.Linear(6, 8)}
        return Composed(run, **parts, down=nn.Linear(8, 6))

    return chain(nn.Identity(), swiglu, lambda m, x: m.out(x), out=nn.Linear(6, 6))


def packed_model() -> nn.Module:
    """Three logical tensors in one weight, so that two ranks of data parallelism cut through the second."""

    def run(model: Any, x: Tensor) -> Tensor:
        q, k, v = model.qkv(x).chunk(3, -1)
        return model.out(q * k.sigmoid() + v)

    return Composed(run, qkv=nn.Linear(6, 12), blocks=nn.ModuleList(), out=nn.Linear(4, 6))


@dataclass(frozen=True)
class Heads:
    """Queries in groups that share a key and a value."""

    groups: int = 6
    ratio: int = 3
    size: int = 3

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows of a group: its queries, its key, its value."""
        return (self.ratio * self.size, self.size, self.size)


HEADS = Heads()
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class GroupedAttention(nn.Module):
    """Grouped-query attention, its projections packed group by group; or as layers of their own, all of a kind stacked.

    The latter repeats keys and values for the queries that share them, as checkpoints of separate layers mean it.
    """

    def __init__(self, packed: bool, width: int, heads: Heads) -> None:
        super().__init__()
        self.heads = heads
        if packed:
            self.qkv_proj = nn.Linear(width, heads.groups * sum(heads.sizes))
        else:
            for name, rows in zip(PROJECTIONS, heads.sizes, strict=True):
                setattr(self, name, nn.Linear(width, heads.groups * rows))
        self.o_proj = nn.Linear(heads.groups * heads.sizes[0], width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x) if hasattr(self, "qkv_proj") else self.stacked(x)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o_proj(attended.transpose(1, 2).flatten(2))

    def packed(self, x: Tensor) -> tuple[Tensor, ...]:
        groups = self.qkv_proj(x).unflatten(-1, (-1, self.heads.ratio + 2, self.heads.size))
        parts = groups.split((self.heads.ratio, 1, 1), dim=-2)
        return tuple(part.expand(-1, -1, -1, self.heads.ratio, -1).flatten(2, 3).transpose(1, 2) for part in parts)

    def stacked(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = (getattr(self, name) for name in PROJECTIONS)
        q, k, v = (layer(x).unflatten(-1, (-1, self.heads.size)).transpose(1, 2) for layer in layers)
        return q, k.repeat_interleave(self.heads.ratio, 1), v.repeat_interleave(self.heads.ratio, 1)


def grouped_model(packed: bool = True) -> nn.Module:
    blocks = lambda: GroupedAttention(packed, 6, HEADS)  # noqa: E731
    return chain(nn.Identity(), blocks, lambda m, x: m.head(x), head=nn.Linear(6, 6))


def _features(generator: torch.Generator) -> Tensor:
    return torch.randn(BATCH, SEQUENCE, 6, generator=generator)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(5, (BATCH, SEQUENCE), generator=generator)


FUSED_PLAN = {"blocks.*.gate_up": FusedColwiseParallel("gate", "up"), "blocks.*.down": RowwiseParallel()}
PACKED_PLAN = {"qkv": FusedColwiseParallel("q", "k", "v"), "out": RowwiseParallel()}
GROUPED_PLAN = {
    "blocks.*.qkv_proj": FusedColwiseParallel(*PROJECTIONS, sizes=HEADS.sizes),
    "blocks.*.o_proj": RowwiseParallel(),
}
SPECS = {
    "tensor": TPSpec(tensor_model, TENSOR_PLAN, _features),
    "uneven": TPSpec(partial(tensor_model, 7, 9), TENSOR_PLAN, _features),
    "language": TPSpec(language_model, LANGUAGE_PLAN, _tokens),
    "tied": TPSpec(partial(language_model, tied=True), LANGUAGE_PLAN, _tokens),
    "uneven_language": TPSpec(partial(language_model, 8, 9, 11), LANGUAGE_PLAN, _tokens),
    "grouped": TPSpec(grouped_model, GROUPED_PLAN, _features),
    "fused": TPSpec(fused_model, FUSED_PLAN, _features),
    "packed": TPSpec(packed_model, PACKED_PLAN, _features),
}
NAMES = {2: ("dp", "tp"), 3: ("dp_replicate", "dp_shard", "tp")}


class Experts(nn.Module):
    """Experts, as many on each rank of "ep"; every rank computes with all tokens and sums over experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, DTensor):
            return torch.einsum("bi,eij->bj", x, self.weight)
        mesh = self.weight.device_mesh
        out = torch.einsum("bi,eij->bj", x, self.weight.to_local())
        return DTensor.from_local(out, mesh, [Partial()], run_check=False).full_tensor()


def mixture(experts: int = 4) -> Any:
    return nn.Sequential(OrderedDict(inp=nn.Linear(3, 3), experts=Experts(experts)))
