"""Runs bodies on ranks that have a GPU each and talk over NCCL."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import meshes, run_ranks

ON_CPU = os.environ.get("SHARDKIT_GPU_TESTS") == "cpu"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this machine")
needs_device = pytest.mark.skipif(
    not (torch.cuda.is_available() or ON_CPU),
    reason="there is no GPU on this machine, and SHARDKIT_GPU_TESTS is not cpu",
)


def run_on_gpus(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """As `run_ranks`, with `cuda` as the device of meshes and NCCL below them; skips where GPUs are too few."""
    if not ON_CPU and torch.cuda.device_count() < world_size:
        pytest.skip(f"{world_size} ranks need as many GPUs; there are {torch.cuda.device_count()}")
    return run_ranks(world_size, _with_gpu, body, args, timeout=300, isolated=True)


def _with_gpu(rank: int, world_size: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    store = dist.PrefixStore("gpu", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    backend, device = ("gloo", None) if ON_CPU else ("cpu:gloo,cuda:nccl", torch.device("cuda", rank))
    if device is not None:
        torch.cuda.set_device(device)
        meshes.DEVICE = "cuda"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device)
    return body(rank, world_size, *args)
