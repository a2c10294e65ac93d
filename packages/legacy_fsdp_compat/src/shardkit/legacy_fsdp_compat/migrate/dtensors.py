"""DTensors in files of torch.save, as FSDP with a `device_mesh` gives them: the boxes that they hold, by their mesh."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.region import regions_of_mesh
from shardkit.core.torch_compat import local_of
from shardkit.legacy_fsdp_compat.migrate.torch_files import StoredShards
from shardkit.legacy_fsdp_compat.torch_compat import ranks_of_mesh

__all__ = ["without_mesh"]


def without_mesh(name: str, tensor: DTensor, path: Path) -> torch.Tensor:
    """A DTensor as the shards that its file has a part of; a replicated one as the plain tensor that it is.

    Raises:
        CheckpointError: for sums that are not added up yet, and local tensors that the placements do not describe.
    """
    local, mesh = local_of(tensor).detach(), tensor.device_mesh
    axes = [axis for axis, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    if not axes:
        return local
    place, found = mesh.get_coordinate(), ranks_of_mesh(mesh)
    if place is None or found is None:
        raise CheckpointError(f"'{name}' in {path} is a DTensor of a rank that is not in its mesh {mesh}")
    ranks, own = found
    ranks = ranks.permute(*(at for at in range(mesh.ndim) if at not in axes), *axes)
    ranks = ranks[*(one for at, one in enumerate(place) if at not in axes)]
    placements = [tensor.placements[axis] for axis in axes]
    try:
        regions = regions_of_mesh(f"'{name}' in {path}", tensor.shape, placements, ranks.shape)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    shards, numbers = StoredShards(), ranks.flatten().tolist()
    mine = regions[numbers.index(own)]
    if mine.shape != tuple(local.shape):
        raise CheckpointError(
            f"'{name}' in {path} has shape {tuple(local.shape)} on rank {own}, expected {mine.shape} by its placements "
            f"{tuple(tensor.placements)} on {mesh}"
        )
    shards.whole = tuple(tensor.shape)
    shards.boxes = [
        (tuple(one.start for one in box), tuple(one.stop - one.start for one in box), rank)
        for region, rank in zip(regions, numbers, strict=True)
        for box, _ in region.boxes()
    ]
    shards.parts = [(tuple(one.start for one in box), local[piece], own) for box, piece in mine.boxes()]
    return shards
