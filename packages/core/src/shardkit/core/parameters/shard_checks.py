"""Checks of a shard before it is adopted or gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardkit.core.mesh import DataParallelMesh

__all__ = ["check_device", "check_shape"]


def check_shape(
    fqn: str, seen: Sequence[int], expected: Sequence[int], whole: Sequence[int], mesh: DataParallelMesh
) -> None:
    """Raises ValueError for a local shard whose shape is not the `expected` one of a parameter of shape `whole`."""
    if tuple(seen) != tuple(expected):
        raise ValueError(
            f"parameter '{fqn}' has a local shard of shape {tuple(seen)} on this rank; expected {tuple(expected)}, "
            f"the chunk of {tuple(whole)} that rank {mesh.shard_rank} of {mesh.shard_size} holds; "
            "assign a tensor of this shape"
        )


def check_device(fqn: str, shard: torch.Tensor, device: torch.device, *, offloaded: bool) -> None:
    """Raises RuntimeError if a shard is on the wrong device: not on the mesh's `device`, or not `offloaded`."""
    expected = "cpu" if offloaded else device.type
    seen = shard.device.type
    if seen == "meta":
        raise RuntimeError(
            f"parameter '{fqn}' is still on the meta device; call shardkit.core.materialize(model), or "
            "model.to_empty(device=...) followed by your initialisation or a load, before the first forward"
        )
    if seen != expected:
        raise RuntimeError(
            f"parameter '{fqn}' is on {shard.device}, expected a {expected} device "
            + ("because of CPUOffloadPolicy" if offloaded else f"because the mesh is on {device.type}")
            + f"; move the model with model.to('{expected}')"
        )
