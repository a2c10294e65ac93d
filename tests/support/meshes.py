"""Device meshes for bodies, made once per rank process: a mesh owns process groups, which live as long as the pool."""

import functools
import os
from datetime import timedelta
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardkit.core.runtime.shared.meeting import neighbours_of

DEVICE = "cpu"
"""Where the tensors of `rank_mesh` lie; `tests.gpu` sets it to "cuda" in its processes."""


@functools.cache
def rank_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh over all ranks, on `DEVICE`. Collective on its first call with the same arguments."""
    return init_device_mesh(DEVICE, shape, mesh_dim_names=names)


def impatient_mesh() -> DeviceMesh:
    """Return a new mesh over all ranks whose collectives wait for four seconds. Collective."""
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=4))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))


def data_mesh(hsdp: bool) -> DeviceMesh:
    """Return a mesh over all ranks: of one axis, or of two replicas."""
    world_size = dist.get_world_size()
    return rank_mesh((2, world_size // 2), ("replicate", "shard")) if hsdp else rank_mesh((world_size,))


@functools.cache
def networked_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh like ``rank_mesh`` whose process groups never share memory, as between hosts. Collective too."""
    with mock.patch.dict(os.environ, SHARDKIT_SHARED_MEMORY="0"):
        if len(shape) == 1:
            mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        else:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for axis in range(mesh.ndim):
            assert neighbours_of(mesh.get_group(axis)) is None
        return mesh
