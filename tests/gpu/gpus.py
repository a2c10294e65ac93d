"""Runs bodies on ranks that have a GPU each and use NCCL, or that share GPUs and use gloo."""

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


def run_on_gpus(world_size: int, body: Callable[..., Any], *args: Any, shared: bool = False) -> list[Any]:
    """As `run_ranks`, with `cuda` as the device of meshes.

    On a machine with fewer GPUs than ranks it skips, because NCCL needs a GPU for each rank. With `shared`, ranks share
    the GPUs there and use gloo.
    """
    gpus = world_size if ON_CPU else torch.cuda.device_count()
    if gpus < world_size and not shared:
        pytest.skip(f"NCCL needs a GPU for each of {world_size} ranks; this machine has {gpus}")
    return run_ranks(world_size, _with_gpu, gpus, body, args, timeout=300, isolated=True)


def _with_gpu(rank: int, world_size: int, gpus: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    store = dist.PrefixStore("gpu", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    if ON_CPU:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        return body(rank, world_size, *args)
    meshes.DEVICE = "cuda"
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    if gpus < world_size:
        dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=world_size)
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world_size, device_id=device)
    return body(rank, world_size, *args)
