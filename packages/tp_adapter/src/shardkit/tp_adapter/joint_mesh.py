"""The axes of a sharded parameter's mesh: those of data parallelism and those of its own DTensor, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardkit.core.mesh import DataParallelMesh
from shardkit.tp_adapter.placing import Axis
from shardkit.tp_adapter.torch_compat import StridedShard, concatenated

__all__ = ["JointMesh", "joint_mesh"]

_Parts = list[tuple[DeviceMesh, Axis]]
"""Axes, each with the 1-D mesh that it is."""


@dataclass(frozen=True)
class JointMesh:
    """The axes of two meshes together, in the order of stock `fully_shard`.

    Attributes:
        axes: size and placement of each; the placement is None for the axis that data parallelism shards over.
        meshes: each axis as a 1-D mesh.
        same_as: the parameter's own mesh, if it has exactly these axes.
        data_axes: indices of the axes of the parameter's own mesh that are data-parallel.
        described: the parameter and both meshes, for messages.
    """

    axes: tuple[Axis, ...]
    meshes: tuple[DeviceMesh, ...]
    same_as: DeviceMesh | None
    data_axes: frozenset[int]
    described: str

    def ordered(self, order: Sequence[int]) -> DeviceMesh:
        """The mesh with the axes in this order.

        If the order differs from the root's, torch would refuse to slice the mesh, as `full_tensor()` does. The mesh is
        then a root itself, over the same process groups.

        Raises:
            ValueError: if the axes are not slices of one root mesh.
        """
        kept = list(order) == list(range(len(self.axes)))
        if kept and self.same_as is not None:
            return self.same_as
        try:
            mesh = concatenated([self.meshes[index] for index in order])
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"{self.described} are not slices of one root mesh ({error}). Make one mesh with init_device_mesh and "
                "use its slices for both"
            ) from error
        if kept:
            return mesh
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        return DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's coordinate."""
        return tuple(mesh.get_local_rank() for mesh in self.meshes)


def joint_mesh(
    parameter: DTensor, placements: Sequence[Placement], fqn: str, data_parallel: DataParallelMesh
) -> JointMesh:
    """Joins the axes of data parallelism and those of a parameter's own mesh. Not collective.

    The parameter's mesh has other axes than the data-parallel one, such as `mesh["tp"]`. If `dp_mesh_dims` named the
    data-parallel axes, it may have these as well, with Replicate on them.

    Args:
        parameter: the parameter, with its own placements.
        placements: the same, but for fused weights those in the whole parameter.
        fqn: name of the parameter, for messages.
        data_parallel: the axes that `fully_shard` received.

    Raises:
        ValueError: for a Partial or unknown placement, overlapping meshes, or unnamed or equally named axes.
    """
    described = f"parameter '{fqn}' with placements {tuple(parameter.placements)} on {parameter.device_mesh}"
    _check_placements(described, parameter.placements)
    own, data = parameter.device_mesh, data_parallel.mesh
    if own.get_coordinate() is None:
        raise ValueError(f"{described}: this rank is not in that mesh; build on each rank the parameters that it holds")
    data_axes = _data_axes(described, own, data_parallel)
    for axis in sorted(data_axes):
        if not parameter.placements[axis].is_replicate():
            raise ValueError(
                f"{described}: axis {axis} is data-parallel, so fully_shard shards over it; make it Replicate() there"
            )
    model = [(_axis_of(described, own, axis), Axis(own.size(axis), placements[axis])) for axis in range(own.ndim)]
    data_part = [
        (
            _axis_of(described, data, axis),
            Axis(data.size(axis), None if axis == data_parallel.shard_axis else Replicate()),
        )
        for axis in range(data.ndim)
    ]
    parts = _in_stock_order(own, model, data_part, data_axes)
    meshes = tuple(mesh for mesh, _ in parts)
    _check_names(described, meshes, data)
    same_as = own if _names(meshes) == _names([own]) else None
    both = f"{described}: its mesh and the data-parallel mesh {data}"
    return JointMesh(tuple(axis for _, axis in parts), meshes, same_as, data_axes, both)


def _check_placements(described: str, placements: Sequence[Placement]) -> None:
    for placement in placements:
        if placement.is_partial():
            raise ValueError(
                f"{described}: {placement} is a pending sum, which cannot be sharded; redistribute it to Replicate or "
                "Shard before fully_shard"
            )
        if not isinstance(placement, Shard | Replicate | StridedShard):
            raise ValueError(
                f"{described}: {placement} is none of Shard, strided Shard and Replicate; redistribute it first"
            )


def _ranks_along(mesh: DeviceMesh, axis: int) -> set[int]:
    """The ranks that differ from this one on `axis` alone. Computed, because a mesh may outlive its groups."""
    here: list[Any] = list(mesh.get_coordinate() or ())
    here[axis] = slice(None)
    return set(mesh.mesh[tuple(here)].tolist())


def _data_axes(described: str, own: DeviceMesh, data_parallel: DataParallelMesh) -> frozenset[int]:
    """The data-parallel axes of the parameter's mesh: all ranks along them are data-parallel peers."""
    data = data_parallel.mesh
    data_ranks, data_names = set(data.mesh.flatten().tolist()), frozenset(data.mesh_dim_names or ())
    found = set()
    for axis in range(own.ndim):
        along = _ranks_along(own, axis)
        name = own.mesh_dim_names[axis] if own.mesh_dim_names else None
        if len(along & data_ranks) > 1 or (len(along) == 1 and name in data_names | data_parallel.named):
            found.add(axis)
            if not data_parallel.named or not along <= data_ranks:
                raise ValueError(
                    f"{described}: its axis {axis if name is None else name!r} and the data-parallel mesh {data} "
                    "overlap. Parallelize the model on a slice such as mesh['tp'] and fully_shard it on mesh['dp'] of "
                    "the same mesh; for DTensors on the full mesh pass that mesh to fully_shard and name the "
                    "data-parallel axes with dp_mesh_dims"
                )
    return frozenset(found)


def _axis_of(described: str, mesh: DeviceMesh, axis: int) -> DeviceMesh:
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"{described}: {mesh} has no axis names, so it cannot be joined with another; slice both from one mesh: "
            "init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
        )
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[axis]]


def _in_stock_order(own: DeviceMesh, model: _Parts, data: _Parts, data_axes: frozenset[int]) -> _Parts:
    """Data-parallel axes first; if the parameter's mesh has them too, they keep their places there."""
    if not data_axes:
        return [*data, *model]
    by_name = {_names([mesh])[0]: (mesh, axis) for mesh, axis in data}
    if set(by_name) <= set(_names([own])):
        return [by_name.get(_names([mesh])[0], (mesh, axis)) for mesh, axis in model]
    # Several axes that data parallelism has flattened into one.
    kept = [part for axis, part in enumerate(model) if axis not in data_axes]
    before = sum(axis not in data_axes for axis in range(min(data_axes)))
    return [*kept[:before], *data, *kept[before:]]


def _names(meshes: Sequence[DeviceMesh]) -> list[str]:
    return [name for mesh in meshes for name in mesh.mesh_dim_names or ()]


def _check_names(described: str, meshes: Sequence[DeviceMesh], data: DeviceMesh) -> None:
    names = _names(meshes)
    if len(set(names)) < len(names):
        raise ValueError(
            f"{described}: together with the data-parallel mesh {data} the axes are {names}; give every axis a name "
            "of its own, as slices of one mesh have"
        )
