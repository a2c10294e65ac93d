"""torchtitan's debug models, sharded by its own parallelize_... functions and trained for three steps."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from recording import Recording, sharded_modules, tokens
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common.attention import ScaledDotProductAttention

BACKEND = "partial_dtensor"


def dims_of(replicas: int, experts: int = 1, tp: int = 1, backend: str = BACKEND) -> ParallelDims:
    """A mesh of all ranks."""
    parallel_dims.device_type = "cpu"  # torchtitan takes a machine without accelerators for one with CUDA
    world = int(os.environ["WORLD_SIZE"])
    dims = ParallelDims(
        dp_replicate=replicas, dp_shard=world // replicas // tp, cp=1, tp=tp, pp=1, ep=experts, world_size=world,
        spmd_backend=backend,
    )  # fmt: skip
    dims.build_mesh()
    return dims


def sharded(registry: Callable[[str], Any], dims: ParallelDims, layers: int, directory: Path) -> nn.Module:
    """The debug model, with the attention of torchtitan's that runs without compiling on a CPU."""
    spec = registry("debugmodel")
    spec.model.layers = spec.model.layers[:layers]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelism = ParallelismConfig(
        spmd_backend=dims.spmd_backend, expert_parallel_degree=dims.ep, tensor_parallel_degree=dims.tp
    )
    if dims.ep > 1 or dims.tp > 1:
        spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=TrainingConfig(), compile_config=CompileConfig(enable=False),
        parallelism=parallelism, ac_config=None, dump_folder=str(directory),
    )  # fmt: skip
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_states(buffer_device=torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, FSDPModule):  # torchtitan divides gradients itself, which gloo cannot do for stock
            module.set_force_sum_reduction_for_comms(True)
    return model


def train(
    recording: Recording,
    model: nn.Module,
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Three steps of AdamW, each inside `around()`."""
    recording.note("sharded modules", sharded_modules(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        batch = tokens(step, dist.get_rank(), vocabulary=2048)
        with around():
            logits = model(batch)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.flatten())
            recording.step(model, optimizer, loss)
    recording.end(model)
