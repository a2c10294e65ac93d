"""Small tensor-parallel models: how to build one, make its layers tensor-parallel and cut it into units of sharding.

Between up and down the activations stay DTensors: torch takes a plain local tensor for an even shard.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardkit.tp_adapter import FusedColwiseParallel

BATCH, SEQUENCE = 2, 4


class Feed(nn.Module):
    """norm, up, down; the norm can be sequence-parallel, `scale` stays a plain parameter."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TensorModel(nn.Module):
    """Activations are whole on every rank; `scale` and the norms are plain parameters."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.inp = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Feed(width, hidden) for _ in range(2))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


class LanguageModel(nn.Module):
    """Embedding and head cut over the vocabulary, norms sequence-parallel; the head can be the embedding."""

    def __init__(self, width: int = 8, hidden: int = 16, vocabulary: int = 12, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Feed(width, hidden) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tied = tied
        self.tie()

    def tie(self) -> None:
        if self.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize_tensor_model(model: nn.Module, tp: DeviceMesh) -> None:
    plan: dict[str, Any] = {"inp": ColwiseParallel(output_layouts=Replicate())}
    for index in range(len(model.blocks)):
        plan |= {
            f"blocks.{index}.up": ColwiseParallel(use_local_output=False),
            f"blocks.{index}.down": RowwiseParallel(),
        }
    parallelize_module(model, tp, plan)


def parallelize_language_model(model: nn.Module, tp: DeviceMesh) -> None:
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(len(model.blocks)):
        plan |= {
            f"blocks.{index}.norm": SequenceParallel(),
            f"blocks.{index}.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            f"blocks.{index}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    parallelize_module(model, tp, plan)
    model.tie()


@dataclass(frozen=True)
class TPSpec:
    """A model, with the parts that a training loop needs."""

    build: Callable[[], nn.Module]
    parallelize: Callable[[nn.Module, DeviceMesh], None]
    inputs: Callable[[torch.Generator], Tensor]

    def loss(self, model: nn.Module, seed: int) -> Tensor:
        """The loss of the micro-batch that `seed` stands for."""
        output = model(self.inputs(torch.Generator().manual_seed(seed)))
        return (output - 0.5).square().mean()


def _features(generator: torch.Generator) -> Tensor:
    return torch.randn(BATCH, SEQUENCE, 6, generator=generator)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(5, (BATCH, SEQUENCE), generator=generator)


def _uneven_tensor_model() -> nn.Module:
    return TensorModel(7, 9)


def _tied_language_model() -> nn.Module:
    return LanguageModel(tied=True)


def _uneven_language_model() -> nn.Module:
    return LanguageModel(8, 9, 11)


SPECS = {
    "tensor": TPSpec(TensorModel, parallelize_tensor_model, _features),
    "uneven": TPSpec(_uneven_tensor_model, parallelize_tensor_model, _features),
    "language": TPSpec(LanguageModel, parallelize_language_model, _tokens),
    "tied": TPSpec(_tied_language_model, parallelize_language_model, _tokens),
    "uneven_language": TPSpec(_uneven_language_model, parallelize_language_model, _tokens),
}


def build(name: str) -> nn.Module:
    """A model with the weights that every rank starts from."""
    torch.manual_seed(1234)
    return SPECS[name].build()


def shard(model: nn.Module, api: Any, mesh: DeviceMesh, **options: Any) -> None:
    """`fully_shard` of each block and of the model."""
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh, **options)
    api.fully_shard(model, mesh=mesh, **options)


class SwiGLU(nn.Module):
    """Gate and up in one weight, or as two layers."""

    def __init__(self, fused: bool, width: int = 6, hidden: int = 8) -> None:
        super().__init__()
        if fused:
            self.gate_up = nn.Linear(width, 2 * hidden)
        else:
            self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1) if hasattr(self, "gate_up") else (self.gate(x), self.up(x))
        return x + self.down(F.silu(gate) * up)


class FusedModel(nn.Module):
    """Blocks with fused weights."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SwiGLU(fused) for _ in range(2))
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def parallelize_fused_model(model: nn.Module, tp: DeviceMesh) -> None:
    plan: dict[str, Any] = {}
    for index in range(len(model.blocks)):
        plan |= {
            f"blocks.{index}.gate_up": FusedColwiseParallel("gate", "up"),
            f"blocks.{index}.down": RowwiseParallel(),
        }
    parallelize_module(model, tp, plan)


class PackedModel(nn.Module):
    """Three logical tensors in one weight, so that two ranks of data parallelism cut through the second."""

    def __init__(self, packed: bool = True) -> None:
        super().__init__()
        if packed:
            self.qkv = nn.Linear(6, 12)
        else:
            self.q, self.k, self.v = (nn.Linear(6, 4) for _ in range(3))
        self.blocks = nn.ModuleList()
        self.out = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        return self.out(q * k.sigmoid() + v)


def parallelize_packed_model(model: nn.Module, tp: DeviceMesh) -> None:
    parallelize_module(model, tp, {"qkv": FusedColwiseParallel("q", "k", "v"), "out": RowwiseParallel()})


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


class GroupedModel(nn.Module):
    """Two blocks of grouped-query attention."""

    def __init__(self, packed: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GroupedAttention(packed, 6, HEADS) for _ in range(2))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize_grouped_model(model: nn.Module, tp: DeviceMesh) -> None:
    plan: dict[str, Any] = {}
    for index in range(len(model.blocks)):
        plan |= {
            f"blocks.{index}.qkv_proj": FusedColwiseParallel(*PROJECTIONS, sizes=HEADS.sizes),
            f"blocks.{index}.o_proj": RowwiseParallel(),
        }
    parallelize_module(model, tp, plan)


SPECS["grouped"] = TPSpec(GroupedModel, parallelize_grouped_model, _features)
SPECS["fused"] = TPSpec(FusedModel, parallelize_fused_model, _features)
SPECS["packed"] = TPSpec(PackedModel, parallelize_packed_model, _features)


NAMES = {2: ("dp", "tp"), 3: ("dp_replicate", "dp_shard", "tp")}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


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


class Mixture(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.inp, self.experts = nn.Linear(3, 3), Experts(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.inp(x))
