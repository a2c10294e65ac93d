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
from tests.support.models import Composed
from tests.support.sharding import shard_each
from tests.tools.llama_shaped import LlamaShaped, SwiGLU

WIDTH, INNER, BATCH, SEQUENCE, VOCABULARY = 96, 256, 4, 32, 301


feed_forward = partial(SwiGLU, WIDTH, INNER)


def experts() -> nn.Module:
    """Every token goes to every expert, weighted: routing whose shapes no data decides."""

    def run(m: Any, x: Tensor) -> Tensor:
        weights = m.router(x).softmax(-1)
        return sum(expert(x) * weights[..., i : i + 1] for i, expert in enumerate(m.experts))

    return Composed(run, router=nn.Linear(WIDTH, 3), experts=nn.ModuleList(feed_forward() for _ in range(3)))


class GPT(LlamaShaped):
    """With layer norms and dropout."""

    def __init__(
        self, inner: Callable[[], nn.Module] = feed_forward, *, tied: bool = False, recompute: bool = False
    ) -> None:
        super().__init__(VOCABULARY, WIDTH, INNER, 3, 4, 4)
        self.recompute = recompute
        for layer in self.layers:
            layer.mlp = nn.Sequential(nn.LayerNorm(WIDTH), inner(), nn.Dropout(0.1))
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def through(self, number: int, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)


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


def lora() -> nn.Module:
    model = GPT()
    model.requires_grad_(False)
    for layer in model.layers:
        for name in ("up_proj", "down_proj"):
            setattr(layer.mlp[1], name, adapted(layer.mlp[1].get_submodule(name)))
    return model


def two_dimensions(mesh: DeviceMesh) -> nn.Module:
    """Tensor-parallel feed-forward layers over the second axis, sharded over the first."""
    model = GPT()
    for layer in model.layers:
        columns = dict.fromkeys(("mlp.1.gate_proj", "mlp.1.up_proj"), ColwiseParallel())
        parallelize_module(layer, mesh["tp"], columns | {"mlp.1.down_proj": RowwiseParallel()})
    return shard_each(*model.layers, model, mesh=mesh["dp"])


def compressed(mesh: DeviceMesh) -> nn.Module:
    """Parameters and gradients of the layers travel in fewer bytes, where ranks share no memory."""
    model = GPT()
    shard_each(*model.layers, mesh=mesh, compression_policy=CompressionPolicy(gather="int8", reduce="bf16"))
    return fully_shard(model, mesh=mesh)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in parameters if one.requires_grad], lr=0.1, momentum=0.9)


tokens = partial(torch.randint, VOCABULARY, (BATCH, SEQUENCE))
images = partial(torch.randn, BATCH, 3, 32, 32)
llama = partial(LlamaShaped, VOCABULARY, WIDTH, INNER, 3, 4, 2)
JOBS: dict[str, TrainingJob] = {
    "gpt": TrainingJob(GPT, tokens, policies=Policies(prefetch_depth=2)),
    "llama": TrainingJob(llama, tokens, policies=Policies(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "convnet": TrainingJob(convnet, images, optimizer=sgd),
    "moe": TrainingJob(partial(GPT, experts), tokens, policies=Policies(wrap=("SwiGLU", "DecoderLayer"))),
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
