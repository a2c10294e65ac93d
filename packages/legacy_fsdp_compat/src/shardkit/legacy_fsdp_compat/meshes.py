"""Makes the mesh that core shards over from process groups or a mesh."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.core import DataParallelMeshDims
from shardkit.legacy_fsdp_compat.api import ShardingStrategy

__all__ = ["DeviceId", "Placement", "ProcessGroups", "placement_for"]

DeviceId = int | str | torch.device | None
"""FSDP's argument `device_id`: an index, or a device or its name, such as "cpu" or "cuda:1"."""

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]

_REPLICATE, _SHARD = "fsdp_replicate", "fsdp_shard"


@dataclass(frozen=True)
class Placement:
    """The ranks, mesh and device of one unit.

    Attributes:
        mesh: 1-D, or 2-D with the replicate axis first.
        dims: the axes of the mesh that shard and replicate; None if their order determines it. A user's mesh is not
            changed, because stock accepts DTensors only on that very mesh.
        group: the process group for sharding (with NO_SHARD, for replication); FSDP1's `process_group`.
        replicate_group: for hybrid strategies, the process group for replication.
        device: device of the mesh on this rank.
        user_mesh: the mesh that the user passed, on which sharded state dicts hold DTensors; None for groups. If it has
            no names, core shards over another mesh with the same ranks.
        strategy: the strategy that was passed, or NO_SHARD if the shard group has one rank.
    """

    mesh: DeviceMesh
    dims: DataParallelMeshDims | None
    group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup | None
    device: torch.device
    user_mesh: DeviceMesh | None
    strategy: ShardingStrategy


_flat_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, str], DeviceMesh]] = WeakKeyDictionary()
_hybrid_meshes: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]]] = (
    WeakKeyDictionary()
)
_node_groups_of: WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]]] = (
    WeakKeyDictionary()
)
"""By the default process group: a new default group invalidates all other groups."""


def placement_for(
    module: nn.Module,
    process_group: ProcessGroups | None,
    strategy: ShardingStrategy,
    device_id: DeviceId,
    device_mesh: DeviceMesh | None,
    has_policy: bool,
) -> Placement:
    """Determines the placement from FSDP's arguments (collective for hybrid strategies: it may make process groups).

    Raises:
        ValueError: for both a process group and a mesh, or for a pair or mesh that does not match the strategy.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise ValueError("process_group and device_mesh were both passed; pass one of them")
        return _from_mesh(device_mesh, strategy)
    device = _device(module, device_id, process_group)
    if strategy.is_hybrid:
        if process_group is None and not has_policy:
            # Each call would make separate groups, but nested modules must share theirs.
            raise ValueError(
                f"{strategy} without an auto_wrap_policy needs process_group=(shard group, replicate group) or a 2-D "
                "device_mesh, so that all FSDP modules share them; pass either"
            )
        shard, replicate = _pair(process_group, strategy)
        mesh = _hybrid_mesh(shard, replicate, device.type)
        names = mesh.mesh_dim_names or ()
        dims = DataParallelMeshDims(shard=names[1], replicate=names[0])
        return Placement(mesh, dims, shard, replicate, device, None, strategy)
    if isinstance(process_group, tuple):
        raise ValueError(f"a pair of process groups is for hybrid strategies, got it with {strategy}; pass one group")
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("FSDP needs a process group: call torch.distributed.init_process_group() first")
    strategy = ShardingStrategy.NO_SHARD if group.size() == 1 else strategy
    return _flat(group, strategy, device)


def _flat(group: dist.ProcessGroup, strategy: ShardingStrategy, device: torch.device) -> Placement:
    name = _REPLICATE if strategy is ShardingStrategy.NO_SHARD else _SHARD
    known = _flat_meshes.setdefault(group, {})
    if (device.type, name) not in known:
        known[device.type, name] = DeviceMesh.from_group(group, device.type, mesh_dim_names=(name,))
    return Placement(known[device.type, name], _flat_dims(strategy, name), group, None, device, None, strategy)


def _flat_dims(strategy: ShardingStrategy, name: str) -> DataParallelMeshDims:
    if strategy is ShardingStrategy.NO_SHARD:
        return DataParallelMeshDims(replicate=name)
    return DataParallelMeshDims(shard=name)


def _from_mesh(mesh: DeviceMesh, strategy: ShardingStrategy) -> Placement:
    device = _current(mesh.device_type)
    if strategy.is_hybrid:
        if mesh.ndim != 2:
            raise ValueError(f"{strategy} needs a 2-D device_mesh (replicate, shard), got {mesh.ndim}-D {mesh}")
        replicate, shard = mesh.get_group(0), mesh.get_group(1)
        named = mesh if mesh.mesh_dim_names else _hybrid_mesh(shard, replicate, mesh.device_type)
        return Placement(named, None, shard, replicate, device, mesh, strategy)
    if mesh.ndim != 1:
        raise ValueError(
            f"{strategy} needs a 1-D device_mesh, got {mesh.ndim}-D {mesh}; pass a slice, or use HYBRID_SHARD"
        )
    group = mesh.get_group()
    strategy = ShardingStrategy.NO_SHARD if group.size() == 1 else strategy
    if strategy is ShardingStrategy.NO_SHARD:
        placed = _flat(group, strategy, device)
        return Placement(placed.mesh, placed.dims, group, None, device, mesh, strategy)
    return Placement(mesh, None, group, None, device, mesh, strategy)


def _pair(groups: ProcessGroups | None, strategy: ShardingStrategy) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    if groups is None:
        return _node_groups()
    if not (isinstance(groups, tuple) and len(groups) == 2 and all(isinstance(g, dist.ProcessGroup) for g in groups)):
        raise ValueError(f"{strategy} needs process_group=(shard group, replicate group), got {groups!r}")
    return groups


def _node_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Shards over the ranks of a machine, replicates over ranks with the same place on theirs (collective at first)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    local = int(os.environ.get("LOCAL_WORLD_SIZE", count or world))
    local = local if local and world % local == 0 else world
    known = _node_groups_of.setdefault(cast(dist.ProcessGroup, dist.group.WORLD), {})
    if local not in known:
        shard = [dist.new_group(list(range(first, first + local))) for first in range(0, world, local)]
        replicate = [dist.new_group(list(range(place, world, local))) for place in range(local)]
        known[local] = (
            cast(dist.ProcessGroup, shard[rank // local]),
            cast(dist.ProcessGroup, replicate[rank % local]),
        )
    return known[local]


def _hybrid_mesh(shard: dist.ProcessGroup, replicate: dist.ProcessGroup, kind: str) -> DeviceMesh:
    known = _hybrid_meshes.setdefault(shard, WeakKeyDictionary()).setdefault(replicate, {})
    if kind not in known:
        rows: list[list[int]] = [[] for _ in range(replicate.size())]
        dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
        known[kind] = DeviceMesh.from_group(
            [replicate, shard], kind, mesh=torch.tensor(rows), mesh_dim_names=(_REPLICATE, _SHARD)
        )
    return known[kind]


def _device(module: nn.Module, device_id: DeviceId, group: ProcessGroups | None) -> torch.device:
    """`device_id`, else the device of the parameters, else (for the CPU or meta) the backend's preferred device."""
    if isinstance(device_id, str):
        device_id = torch.device(device_id)
    if isinstance(device_id, torch.device):
        return device_id if device_id.index is not None or device_id.type == "cpu" else _current(device_id.type)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device_id is not None:
        if accelerator is None:
            raise ValueError(f"device_id={device_id}, but this process has no accelerator; pass torch.device('cpu')")
        return torch.device(accelerator.type, device_id)
    kinds = {parameter.device.type for parameter in module.parameters()} - {"meta", "cpu"}
    if kinds:
        return _current(kinds.pop())
    one = group[0] if isinstance(group, tuple) else group
    if accelerator is not None and accelerator.type in dist.get_backend_config(one):
        return _current(accelerator.type)
    return torch.device("cpu")


def _current(kind: str) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
