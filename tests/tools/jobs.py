"""Training jobs of eleven kinds, each runnable with real ranks and with fake tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from shardkit.core import CompressionPolicy, fully_shard
from shardkit.tools import Policies, TrainingJob
from tests.support.models import Attention, Composed
from tests.support.sharding import shard_each
from tests.tools.llama_shaped import LlamaShaped

WIDTH, BATCH, SEQUENCE, VOCABULARY = 96, 4, 32, 301


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def experts() -> nn.Module:
    """Every token goes to every expert, weighted: routing whose shapes no data decides."""

    def run(m: Any, x: Tensor) -> Tensor:
        weights = m.router(x).softmax(-1)
        return sum(expert(x) * weights[..., i : i + 1] for i, expert in enumerate(m.experts))

    return Composed(run, router=nn.Linear(WIDTH, 3), experts=nn.ModuleList(FeedForward() for _ in range(3)))


class Layer(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module] = FeedForward, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.mixer = nn.LayerNorm(WIDTH), Attention(WIDTH, 4)
        self.norm2, self.inner = nn.LayerNorm(WIDTH), inner()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.mixer(self.norm1(x)))
        return x + self.dropout(self.inner(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module] = FeedForward, *, tied: bool = False, recompute: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(inner, dropout=0.1) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))


def convnet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        for stage in m.stages:
            x = stage(x)
        return m.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    stages = nn.ModuleList(
        nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU())
        for width in (32, 64, 128)
    )
    return Composed(run, stem=nn.Conv2d(3, 32, 3, padding=1), stages=stages, head=nn.Linear(256, 10))


def adapted(base: nn.Linear) -> nn.Module:
    """A frozen layer with LoRA's two beside it."""
    a, b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
    return Composed(lambda m, x: m.base(x) + m.b(m.a(x)), base=base.requires_grad_(False), a=a, b=b)


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE))


def images() -> Tensor:
    return torch.randn(BATCH, 3, 32, 32)


def llama() -> nn.Module:
    return LlamaShaped(VOCABULARY, WIDTH, 8 * WIDTH // 3, 3, 4, 2)


def lora() -> nn.Module:
    model = GPT()
    model.requires_grad_(False)
    for layer in model.layers:
        layer.inner.up, layer.inner.down = adapted(layer.inner.up), adapted(layer.inner.down)
    return model


def two_dimensions(mesh: DeviceMesh) -> nn.Module:
    """Tensor-parallel feed-forward layers over the second axis, sharded over the first."""
    model = GPT()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"inner.up": ColwiseParallel(), "inner.down": RowwiseParallel()})
    return shard_each(*model.layers, model, mesh=mesh["dp"])


def compressed(mesh: DeviceMesh) -> nn.Module:
    """Parameters and gradients of the layers travel in fewer bytes, where ranks share no memory."""
    model = GPT()
    shard_each(*model.layers, mesh=mesh, compression_policy=CompressionPolicy(gather="int8", reduce="bf16"))
    return fully_shard(model, mesh=mesh)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in parameters if one.requires_grad], lr=0.1, momentum=0.9)


JOBS: dict[str, TrainingJob] = {
    "gpt": TrainingJob(GPT, tokens, policies=Policies(prefetch_depth=2)),
    "llama": TrainingJob(llama, tokens, policies=Policies(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "convnet": TrainingJob(convnet, images, optimizer=sgd),
    "moe": TrainingJob(partial(GPT, experts), tokens, policies=Policies(wrap=("FeedForward", "Layer"))),
    "lora": TrainingJob(lora, tokens, optimizer=sgd),
    "tied": TrainingJob(partial(GPT, tied=True), tokens),
    "accumulation": TrainingJob(GPT, tokens, policies=Policies(accumulate=3, reshard_after_forward=False)),
    "checkpointing": TrainingJob(partial(GPT, recompute=True), tokens),
    "two_dimensions": TrainingJob(two_dimensions, tokens),
    "replicas": TrainingJob(GPT, tokens),
    "compressed": TrainingJob(compressed, tokens),
}


# The mesh of each job on so many ranks.
def mesh_of(name: str, world_size: int) -> dict[str, int]:
    if name == "two_dimensions":
        return {"dp": world_size // 2, "tp": 2} if world_size % 2 == 0 else {"dp": world_size, "tp": 1}
    if name == "replicas" and world_size % 2 == 0:
        return {"dp_replicate": 2, "dp_shard": world_size // 2}
    return {"dp": world_size}
