"""Device meshes for bodies, made once per rank process: a mesh owns process groups, which live as long as the pool."""

import functools

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@functools.cache
def rank_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a CPU mesh over all ranks. Collective on its first call with the same arguments."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)
