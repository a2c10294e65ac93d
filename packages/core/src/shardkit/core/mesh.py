"""From a mesh and the names of its axes to the process groups of data parallelism."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardkit.core.policies import DataParallelMeshDims
from shardkit.core.torch_compat import flattened_axis, joined_mesh


@dataclass(frozen=True)
class DataParallelMesh:
    """The data-parallel part of a mesh: one shard axis, one replicate axis, or both (HSDP).

    Attributes:
        mesh: 1-D, or 2-D with the replicate axis first.
        shard_axis: index of the axis that parameters are sharded over, None if they are only replicated.
        replicate_axes: those that they are replicated over, in the order of the gradients' all-reduces.
        named: the axes named by `dp_mesh_dims` of the mesh `whole`, which may hold DTensor parameters; several of them
            may be flattened into one axis here.
        size: number of data-parallel ranks, over which gradients are averaged.
        process_groups: `shard_group`, if anything is sharded, and `replicate_groups`.
    """

    mesh: DeviceMesh
    shard_axis: int | None
    replicate_axes: tuple[int, ...] = ()
    named: frozenset[str] = frozenset()
    whole: DeviceMesh | None = None
    size: int = field(init=False, compare=False)
    shard_size: int = field(init=False, compare=False)
    shard_rank: int = field(init=False, compare=False)
    shard_group: dist.ProcessGroup | None = field(init=False, compare=False)
    replicate_groups: tuple[dist.ProcessGroup, ...] = field(init=False, compare=False)
    process_groups: tuple[dist.ProcessGroup, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        mesh, axis = self.mesh, self.shard_axis
        shard_group = None if axis is None else mesh.get_group(axis)
        replicate_groups = tuple(mesh.get_group(one) for one in self.replicate_axes)
        vars(self).update(  # frozen
            size=mesh.size(),
            shard_size=1 if axis is None else mesh.size(axis),
            shard_rank=0 if axis is None else mesh.get_local_rank(axis),
            shard_group=shard_group,
            replicate_groups=replicate_groups,
            process_groups=replicate_groups if shard_group is None else (shard_group, *replicate_groups),
        )

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The shard axis as a separate mesh; the whole mesh if nothing is sharded."""
        names = self.mesh.mesh_dim_names
        return self.mesh if self.shard_axis is None or names is None else self.mesh[names[self.shard_axis]]

    @property
    def fully_replicated(self) -> DataParallelMesh:
        """The same ranks with nothing sharded, for 0-dim parameters."""
        axes = () if self.shard_axis is None else (self.shard_axis,)
        return DataParallelMesh(self.mesh, None, axes + self.replicate_axes, self.named, self.whole)

    def placements(self, cut: Placement | None) -> tuple[Placement, ...]:
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        if cut is not None and self.shard_axis is not None:
            placements[self.shard_axis] = cut
        return tuple(placements)


@dataclass(frozen=True)
class PostForwardMesh:
    """The smaller group of ranks that hold a parameter between forward and backward."""

    group: dist.ProcessGroup
    size: int
    rank: int


def default_mesh() -> DeviceMesh:
    """All ranks in one axis, on the machine's accelerator if it has one. Initialises the default group if needed."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def data_parallel_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataParallelMesh:
    """The data-parallel axes of `mesh`: all of a 1-D or 2-D mesh, or those that `dims` names."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh, got {type(mesh).__name__}; make one with init_device_mesh, or from a process "
            "group with DeviceMesh.from_group"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}; pass a mesh that contains every rank that calls "
            "fully_shard with it"
        )
    if dims is not None:
        return _named_axes(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a 1-D mesh (FSDP) or a 2-D mesh (HSDP), got {mesh.ndim}-D {mesh}; "
            'pass a slice such as mesh["dp"], or name the data-parallel axes with dp_mesh_dims'
        )
    if mesh.ndim == 1:
        return DataParallelMesh(mesh, shard_axis=0)
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"a 2-D mesh for HSDP needs axis names, got {mesh}; "
            'use init_device_mesh(..., mesh_dim_names=("dp_replicate", "dp_shard"))'
        )
    first, second = mesh.mesh_dim_names
    others = {"cp", "tp", "ep", "pp", "sp"}  # names that say that the first axis is not meant for replicas
    if "shard" in first or "fsdp" in first or "replic" in second or others.intersection((first, second)):
        warnings.warn(
            f"fully_shard replicates parameters over '{first}' and shards them over '{second}', as a 2-D mesh stands "
            "for HSDP. If that is not meant, name the data-parallel axes, for example dp_mesh_dims="
            f"DataParallelMeshDims(shard=('{first}', '{second}')) or DataParallelMeshDims(shard='{first}'), or pass "
            f"mesh[\"{first}\"]; if it is, pass DataParallelMeshDims(replicate='{first}', shard='{second}')",
            stacklevel=3,
        )
    return DataParallelMesh(mesh, shard_axis=1, replicate_axes=(0,))


def _named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"dp_mesh_dims names axes, but the mesh has no axis names: {mesh}; pass mesh_dim_names to init_device_mesh"
        )
    wanted = dims.shard_names + dims.replicate_names
    if unknown := [name for name in wanted if name not in names]:
        raise ValueError(f"dp_mesh_dims names {unknown}, but the mesh has the axes {names}; use these")
    if len(set(wanted)) < len(wanted):
        raise ValueError(
            f"dp_mesh_dims names an axis twice: shard {dims.shard_names}, replicate {dims.replicate_names}; "
            "name it once"
        )
    named = frozenset(wanted)
    if not dims.shard_names:
        replicate = flattened_axis(mesh, dims.replicate_names)
        return DataParallelMesh(replicate, None, (0,), named, mesh)
    shard = flattened_axis(mesh, dims.shard_names)
    if not dims.replicate_names:
        return DataParallelMesh(shard, 0, (), named, mesh)
    return DataParallelMesh(joined_mesh(flattened_axis(mesh, dims.replicate_names), shard), 1, (0,), named, mesh)


def groups_of_copies(tensor: torch.Tensor) -> list[dist.ProcessGroup]:
    """The process groups whose ranks hold copies of one another's part of a DTensor, a group for each mesh axis."""
    if not isinstance(tensor, DTensor):
        return []
    axes = [axis for axis, one in enumerate(tensor.placements) if one.is_replicate()]
    mesh = tensor.device_mesh
    if not axes or mesh.get_coordinate() is None:
        return []
    return [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]


def device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


# One process group per (shard group, size): blocks of one model share it.
_post_forward_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[int, PostForwardMesh]] = WeakKeyDictionary()


def post_forward_mesh(data_parallel: DataParallelMesh, size: int) -> PostForwardMesh | None:
    """The `size` neighbouring ranks to reshard to after forward, None for all (collective: it may make a group)."""
    shard_size, group = data_parallel.shard_size, data_parallel.shard_group
    if size < 1 or size > shard_size or shard_size % size:
        raise ValueError(
            f"reshard_after_forward={size} must divide the {shard_size} ranks of the shard group; choose a divisor"
        )
    if size == shard_size or group is None:
        return None
    known = _post_forward_meshes.setdefault(group, {})
    if size not in known:
        first = data_parallel.shard_rank // size * size
        ranks = dist.get_process_group_ranks(group)[first : first + size]
        smaller = dist.new_group(ranks, use_local_synchronization=True)
        known[size] = PostForwardMesh(smaller, size, data_parallel.shard_rank % size)
    return known[size]
