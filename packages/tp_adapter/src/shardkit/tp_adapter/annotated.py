"""How `fully_shard` shards a plain parameter that `spmd_types` annotates as a part of a larger one, or sums over ranks.

The module computes with the plain local tensor, and `spmd_types` with its annotations, which are attributes of it:
core copies these to every unsharded parameter. The sharded parameter is a DTensor on the whole mesh, as for a user who
made one: `S(dim)` is `Shard(dim)`, `R` and `I` are `Replicate()`. The gradient of an `R` parameter is a sum
that is still to be made over that axis, `Partial()`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardkit.core.mesh import DataParallelMesh
from shardkit.core.torch_compat import new_dtensor

__all__ = ["as_dtensor"]


def as_dtensor(
    parameter: torch.Tensor, fqn: str, data_parallel: DataParallelMesh
) -> tuple[DTensor, tuple[Placement, ...]]:
    """The DTensor on the whole mesh that an annotated parameter is this rank's part of, and the gradient's placements.

    Not collective. Axes of the mesh of type checking that the parameter has no annotation on become `R`, as in stock.

    Raises:
        ValueError: for an axis of model parallelism without an annotation, or a data-parallel one with another than R.
        NotImplementedError: for an annotation that no placement stands for.
    """
    spmd: Any = sys.modules["spmd_types"]
    mesh = data_parallel.whole
    assert mesh is not None and mesh.mesh_dim_names is not None, fqn
    kinds: dict[Any, Any] = dict(spmd.get_local_type(parameter))
    if (spec := spmd.get_partition_spec(parameter)) is not None:
        kinds.update(spmd.types.partition_spec_to_shard_types(spec))
    data_axes = [spmd.MeshAxis.of(group) for group in data_parallel.process_groups]
    for axis, kind in kinds.items():
        if kind is not spmd.R and any(axis <= one for one in data_axes):
            raise ValueError(
                f"spmd_types annotates parameter '{fqn}' with {kind} on the data-parallel axis {axis}; expected "
                f"{spmd.R}, as fully_shard gathers it there and reduces its gradient. Leave this axis out"
            )
    placements, gradients = [], []
    for name in mesh.mesh_dim_names:
        axis = spmd.MeshAxis.of(mesh.get_group(name))
        of_data = name in data_parallel.named
        kind = spmd.R if of_data or axis.size() == 1 else kinds.get(axis)
        if kind is None:
            raise ValueError(
                f"spmd_types annotates parameter '{fqn}' on {list(kinds)}, but not on the axis '{name}' of {mesh}; "
                "give one for every axis of several ranks that is not in dp_mesh_dims"
            )
        placements.append(_placement(kind, fqn, name, spmd))
        gradients.append(Partial() if kind is spmd.R and not of_data and axis.size() > 1 else placements[-1])
    _fill_in(parameter, kinds, mesh, spmd)
    shape = list(parameter.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.size(axis)
    return new_dtensor(parameter, mesh, placements, torch.Size(shape)), tuple(gradients)


def _placement(kind: Any, fqn: str, name: str, spmd: Any) -> Placement:
    if kind is spmd.R or kind is spmd.I:
        return Replicate()
    if isinstance(kind, spmd.Shard):
        return Shard(kind.dim)
    raise NotImplementedError(
        f"spmd_types annotates parameter '{fqn}' with {kind} on the axis '{name}', which no placement stands for; "
        "expected R, I or S(dim); use one of these"
    )


def _fill_in(parameter: torch.Tensor, kinds: dict[Any, Any], mesh: DeviceMesh, spmd: Any) -> None:
    """Annotates with R on the axes of the current mesh of type checking, if the annotations do not span it yet."""
    spanned = 1
    for axis in kinds:
        spanned *= axis.size()
    missing = {axis: spmd.R for axis in spmd.current_mesh() or () if axis not in kinds}
    if spanned < mesh.size() and missing:
        spmd.assert_type(parameter, missing)
