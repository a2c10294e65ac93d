"""One process as any rank of any world, with tensors that have no data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardkit.tools.estimating.errors import EstimateError
from shardkit.tools.torch_compat import forget_meshes, join_fake_world

MOST_RANKS = 16_384


def axes_of(mesh: int | Mapping[str, int]) -> dict[str, int]:
    """The axes of a mesh, given as a world size or as sizes by name.

    Raises:
        EstimateError: for no axes, sizes below one, or more ranks than can be simulated.
    """
    axes = {"dp": mesh} if isinstance(mesh, int) else dict(mesh)
    if not axes or any(size < 1 for size in axes.values()) or math.prod(axes.values()) > MOST_RANKS:
        raise EstimateError(
            f"a mesh of {axes} cannot be simulated; expected sizes from 1 on, {MOST_RANKS} ranks at most"
        )
    return axes


@contextlib.contextmanager
def fake_world(axes: Mapping[str, int], rank: int) -> Iterator[DeviceMesh]:
    """Within this context the process is `rank` of a world without peers; gives its mesh, on "cpu".

    Raises:
        EstimateError: if the process is a rank of something already, or the world has no such rank.
    """
    if dist.is_initialized():
        raise EstimateError(
            "this process has a default process group already; an estimate runs in a process of its own, without "
            "torchrun and before init_process_group"
        )
    world_size = math.prod(axes.values())
    if not 0 <= rank < world_size:
        raise EstimateError(f"there is no rank {rank} among {world_size} ranks; expected 0 to {world_size - 1}")
    join_fake_world(rank, world_size)
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
        forget_meshes()
