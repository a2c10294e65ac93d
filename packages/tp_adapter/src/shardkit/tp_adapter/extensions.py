"""FSDP1's hooks for parameters that are DTensors: flattening, chunks for state dicts, and back.

Offsets and sizes of chunks follow the layout, so they are correct for uneven shards as well. FSDP1 passes no parameter
names to its hooks, so errors describe a tensor by its shape, placements and mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardkit.core.mesh import DataParallelMesh
from shardkit.core.parameters.region import region_at
from shardkit.core.runtime.sharding import ChunkLayout
from shardkit.core.torch_compat import local_of, new_dtensor
from shardkit.tp_adapter.adapter import form_of
from shardkit.tp_adapter.torch_compat import ShardedTensor, ShardedTensorShard, group_of, root_of, sharded_tensor

__all__ = ["DTensorExtensions", "FlattenedDTensor"]


@dataclass(frozen=True)
class FlattenedDTensor:
    """A DTensor's mesh and layout, kept by `pre_flatten_transform`."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


class DTensorExtensions:
    """Callable in place of `torch.distributed.tensor.parallel.fsdp.DTensorExtensions`, for 2-D FSDP1 and its callers.

    Tensor-parallel meshes are 1-D, as FSDP1 has them.
    """

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, FlattenedDTensor | None]:
        """The local tensor of a DTensor, for the flat parameter, and the data to rebuild the DTensor."""
        if not isinstance(tensor, DTensor):
            return tensor, None
        local = local_of(tensor)
        if tensor.requires_grad:
            local.requires_grad_()
        return local, FlattenedDTensor(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: FlattenedDTensor) -> torch.Tensor:
        """The DTensor around a view of the flat parameter; gradients flow through it."""
        extension = param_extension
        return DTensor.from_local(
            tensor,
            extension.mesh,
            extension.placements,
            run_check=False,
            shape=extension.shape,
            stride=extension.stride,
        )

    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """This rank's chunk on dim 0 over `pg`, as a ShardedTensor; not collective.

        A DTensor becomes a ShardedTensor over its own mesh, whose local shard is the ShardedTensor over `pg` of its
        local tensor. This is FSDP1's format of 2-D checkpoints.

        Args:
            tensor: whole over `pg`: a plain tensor, a DTensor on a 1-D mesh, or a ShardedTensor with one local shard.
            rank: this rank in `pg`.
            world_size: ranks of `pg`.
            num_devices_per_node: not used; every chunk stays on the tensor's device.
            pg: the data-parallel ranks.
            device: not used.

        Raises:
            ValueError: if a DTensor's local tensor is not a single box; the message has its placements.
        """
        if isinstance(tensor, DTensor):
            mesh, local = tensor.device_mesh, local_of(tensor)
            pieces = _model_pieces(tensor)
            inner = _chunked(local, rank, world_size, pg)
            return sharded_tensor(pieces, tensor.shape, local, inner, mesh.get_group())
        if isinstance(tensor, ShardedTensor):
            (shard,) = tensor.local_shards()
            metadata = tensor.metadata()
            pieces = [
                (tuple(one.shard_offsets), tuple(one.shard_sizes), _rank_of(one.placement))
                for one in metadata.shards_metadata
            ]
            inner = _chunked(shard.tensor, rank, world_size, pg)
            return sharded_tensor(pieces, metadata.size, shard.tensor, inner, group_of(tensor))
        return _chunked(tensor, rank, world_size, pg)

    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> DTensor:
        """This rank's chunk on dim 0 over `device_mesh`, as a DTensor on it and the tensor's own mesh; not collective.

        A plain tensor becomes one on all of the root mesh, replicated on the axes that do not shard, as FSDP1 expects.

        Args:
            tensor: whole over `device_mesh`: a DTensor on a mesh of the same root, or a plain tensor.
            rank: this rank's place on the axis that shards.
            device_mesh: 1-D, or 2-D with the replicate axis first (HSDP).
        """
        axes = (0,) if device_mesh.ndim > 1 else ()
        data = DataParallelMesh(device_mesh, device_mesh.ndim - 1, axes)
        if not isinstance(tensor, DTensor):
            layout = ChunkLayout(tuple(tensor.shape), 0, data.shard_size)
            chunk = tensor.detach().narrow(0, layout.offset(rank), layout.length(rank)).clone()
            root, cut = root_of(device_mesh), (device_mesh.mesh_dim_names or (None,))[-1]
            names = root.mesh_dim_names or ()
            if cut not in names:  # unnamed or flattened
                return new_dtensor(chunk, device_mesh, data.placements(Shard(0)), tensor.shape)
            placements = [Shard(0) if name == cut else Replicate() for name in names]
            return new_dtensor(chunk, root, placements, tensor.shape)
        form = form_of(tensor, _described(tensor), data, 0)
        local = local_of(tensor.detach())
        layout = ChunkLayout(tuple(local.shape), 0, data.shard_size)
        return form.sharded(local.narrow(0, layout.offset(rank), layout.length(rank)).clone())

    def pre_load_state_dict_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """The ShardedTensor over the data-parallel ranks, taken out of an outer one if any, and its local shards."""
        assert isinstance(tensor, ShardedTensor)
        shards: list[ShardedTensorShard] = tensor.local_shards()
        if len(shards) == 1 and isinstance(shards[0].tensor, ShardedTensor):
            inner = shards[0].tensor
            return inner, inner.local_shards()
        return tensor, shards

    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """The local tensor of the tensor-parallel DTensor, gathered over the data-parallel axes (collective over them).

        Args:
            tensor: what `chunk_dtensor` makes of a DTensor; its tensor-parallel axis is the last of `parent_mesh`.
            parent_mesh: the mesh that data and tensor parallelism were sliced from.

        Raises:
            ValueError: if the tensor lies on other ranks than `parent_mesh`, or a mesh has no names.
        """
        mesh = tensor.device_mesh
        if parent_mesh is None or set(mesh.mesh.flatten().tolist()) != set(parent_mesh.mesh.flatten().tolist()):
            raise ValueError(
                f"a {_described(tensor)} lies on {mesh}, not on the ranks of {parent_mesh}; place it there"
            )
        if mesh.mesh_dim_names is None or parent_mesh.mesh_dim_names is None:
            raise ValueError(
                f"a {_described(tensor)} lies on {mesh}, of {parent_mesh}; name the axes, to say "
                "which of them is tensor-parallel: init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
            )
        local = local_of(tensor)
        for axis, name in enumerate(mesh.mesh_dim_names):
            if name != parent_mesh.mesh_dim_names[-1] and not tensor.placements[axis].is_replicate():
                local = _gathered(local, tensor, axis)
        return local


def _described(tensor: DTensor) -> str:
    return f"DTensor of shape {tuple(tensor.shape)} with placements {tuple(tensor.placements)}"


def _model_pieces(tensor: DTensor) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Offset, size and global rank of every rank's piece; for a replicated tensor, only this rank's."""
    mesh = tensor.device_mesh
    if mesh.ndim != 1:
        raise ValueError(f"a {_described(tensor)} lies on {mesh}; place it on a 1-D mesh")
    ranks = [dist.get_rank()] if tensor.placements[0].is_replicate() else mesh.mesh.tolist()
    pieces = []
    for index, rank in enumerate(ranks):
        region = region_at(_described(tensor), tensor.shape, tensor.placements, (mesh.size(),), (index,))
        boxes = [box for box, _ in region.boxes()] if region.numel else []
        if len(boxes) > 1:
            raise ValueError(
                f"a {_described(tensor)} has {len(boxes)} boxes on a rank, which a "
                "ShardedTensor cannot say; save it as a DTensor"
            )
        if boxes:
            pieces.append((tuple(one.start for one in boxes[0]), region.shape, rank))
        else:
            pieces.append((_empty_at(tensor, region.shape), region.shape, rank))
    return pieces


def _rank_of(placement: Any) -> int:
    rank = placement.rank()
    assert isinstance(rank, int)
    return rank


def _empty_at(tensor: DTensor, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The offset given to a piece without elements: the end of the dims in which it is empty."""
    return tuple(whole if not size else 0 for whole, size in zip(tensor.shape, sizes, strict=True))


def _chunked(tensor: torch.Tensor, rank: int, world_size: int, group: dist.ProcessGroup) -> ShardedTensor:
    layout = ChunkLayout(tuple(tensor.shape), 0, world_size)
    held = [index for index in range(world_size) if layout.length(index)] or [0]
    zeros = (0,) * (tensor.ndim - 1)
    pieces = [
        ((layout.offset(index), *zeros), layout.local_shape(index), dist.get_global_rank(group, index))
        for index in held
    ]
    local = tensor.detach().narrow(0, layout.offset(rank), layout.length(rank)).clone() if rank in held else None
    return sharded_tensor(pieces, tensor.shape, tensor, local, group)


def _gathered(local: torch.Tensor, tensor: DTensor, axis: int) -> torch.Tensor:
    """The chunks of one axis of a tensor's mesh, concatenated on the dim that it cuts (collective over it)."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    dim: int = tensor.placements[axis].dim  # type: ignore[attr-defined]
    places = [[*coordinate[:axis], index, *coordinate[axis + 1 :]] for index in range(mesh.size(axis))]
    regions = [
        region_at(_described(tensor), tensor.shape, tensor.placements, mesh.mesh.shape, place) for place in places
    ]
    lengths = [region.shape[dim] for region in regions]
    padded = local.new_zeros(*local.shape[:dim], max(lengths), *local.shape[dim + 1 :])
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    chunks = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(chunks, padded, group=mesh.get_group(axis))
    return torch.cat([chunk.narrow(dim, 0, length) for chunk, length in zip(chunks, lengths, strict=True)], dim)
