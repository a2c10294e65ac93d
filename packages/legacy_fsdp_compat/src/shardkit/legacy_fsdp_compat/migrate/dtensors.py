"""DTensors in files of torch.save, as FSDP with a `device_mesh` gives them: the rows that they hold, by their mesh."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit.core.torch_compat import local_of
from shardkit.legacy_fsdp_compat.flat_layout import row_intervals
from shardkit.legacy_fsdp_compat.migrate.stored import CheckpointError
from shardkit.legacy_fsdp_compat.migrate.torch_files import StoredShards

__all__ = ["without_mesh"]


def without_mesh(name: str, tensor: DTensor, path: Path) -> torch.Tensor:
    """A DTensor as the shards that its file has a part of; a replicated one as the plain tensor that it is.

    Raises:
        CheckpointError: if it is cut on more than dim 0.
    """
    local, mesh = local_of(tensor).detach(), tensor.device_mesh
    axes = [axis for axis, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    if not axes:
        return local
    (axis, *more) = axes
    placement, place = tensor.placements[axis], mesh.get_coordinate()
    if more or type(placement) is not Shard or placement.dim != 0 or place is None:
        raise CheckpointError(
            f"'{name}' in {path} is a DTensor with placements {tuple(tensor.placements)} on {mesh}; only those "
            "that one axis cuts, on dim 0, are converted. Load it where it was saved, and save it with "
            "torch.distributed.checkpoint"
        )
    shape = tuple(tensor.shape)
    row = math.prod(shape[1:])
    ranks = mesh.mesh.movedim(axis, -1)[*(one for at, one in enumerate(place) if at != axis)].tolist()
    cuts = [(low // row, (high - low) // row) if row else (0, 0) for low, high in row_intervals(shape, len(ranks))]
    rest = (0,) * (len(shape) - 1)
    shards = StoredShards()
    shards.whole = shape
    shards.boxes = [
        ((first, *rest), (rows, *shape[1:]), rank) for (first, rows), rank in zip(cuts, ranks, strict=True) if rows
    ]
    shards.parts = [((cuts[place[axis]][0], *rest), local, ranks[place[axis]])] if local.numel() else []
    return shards
