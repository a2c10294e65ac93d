"""Writes SHARDED checkpoints of one file a rank, as ranks of FSDP1 would, without ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of
from shardkit.core.checkpoint.stored import Checkpoint, StoredTensor
from shardkit.core.checkpoint.torch_writer import Content, Place, TorchWriter
from shardkit.legacy_fsdp_compat.flat_layout import row_intervals
from shardkit.legacy_fsdp_compat.torch_compat import PickledShards

__all__ = ["Ranks", "ShardedWriter", "check_count", "parameters_in_groups"]

_STATE = "state"


@dataclass(frozen=True)
class Ranks:
    """The ranks that SHARDED rank files are for.

    Attributes:
        count: how many, at least two.
        parameters: names of the model's parameters; only these, and what optimizers keep for each of their elements,
            are cut. Nothing in a checkpoint tells them from buffers, of which every rank has all.

    Raises:
        CheckpointError: for fewer than two ranks.
    """

    count: int
    parameters: Collection[str]

    def __post_init__(self) -> None:
        check_count(self.count)


def check_count(count: int) -> None:
    """Raises `CheckpointError` for fewer than two ranks."""
    if count < 2:
        raise CheckpointError(
            f"rank files for {count} rank(s): FSDP1 shards over two and more, and a single rank's state dicts are "
            "whole; convert to 'full'"
        )


def parameters_in_groups(checkpoint: Checkpoint) -> set[str]:
    """The parameters that the groups of the optimizers in a checkpoint list by name."""
    listed: list[Any] = []
    for path, value in checkpoint.objects.items():
        if path[-1] == "param_groups":
            listed += [key for group in value for key in group["params"]]
        elif path[-1] == "params" and "param_groups" in path:
            listed += value
    return {key for key in listed if isinstance(key, str)}


class ShardedWriter(TorchWriter):
    """`rank0.pt` and so on, nested dicts with ShardedTensors.

    Raises:
        CheckpointError: for optimizer state by number, and for parameters that are not in the checkpoint.
    """

    def __init__(self, directory: Path, checkpoint: Checkpoint, ranks: Ranks) -> None:
        super().__init__(directory, checkpoint, [f"rank{rank}.pt" for rank in range(ranks.count)])
        self._count = ranks.count
        self._cut = _what_is_cut(checkpoint, ranks.parameters)

    def memory_in(self, leaf: Any) -> torch.Tensor | None:
        """The tensor that a leaf is pickled with."""
        return leaf.local if isinstance(leaf, PickledShards) else super().memory_in(leaf)

    def content(self, number: int) -> Content:
        """Rows of what is cut, and all of everything else."""
        content = Content()
        for path, stored in self._checkpoint.tensors.items():
            self._add(content, path, stored, number)
        content.leaves.update(self._checkpoint.objects)
        return content

    def _add(self, content: Content, path: LeafPath, stored: StoredTensor, rank: int) -> None:
        if path not in self._cut:
            content.add_whole(path, stored)
            return
        rest = stored.shape[1:]
        intervals = row_intervals(stored.shape, self._count)
        rows = [(low // stored.row, (high - low) // stored.row) for low, high in intervals if high > low]
        boxes = [([first, *[0] * len(rest)], [count, *rest]) for first, count in rows]
        local = torch.empty(boxes[rank][1], dtype=stored.dtype) if rank < len(boxes) else None
        content.leaves[path] = PickledShards(local, torch.Size(stored.shape), stored.dtype, boxes, rank, self._count)
        if local is not None:
            content.places[path] = Place(*intervals[rank], local)


def _what_is_cut(checkpoint: Checkpoint, parameters: Collection[str]) -> set[LeafPath]:
    shapes = {path[-1]: one.shape for path, one in checkpoint.tensors.items() if path[-1] in parameters}
    missing = sorted(name for name in parameters if name not in shapes)
    if shapes and missing:
        raise CheckpointError(f"the checkpoint lacks the parameters {missing[:5]} ({len(missing)} in all)")
    cut = set()
    for path, stored in checkpoint.tensors.items():
        if not stored.numel or not stored.shape:
            continue
        if path[-1] in parameters:
            cut.add(path)
        elif len(path) > 2 and path[-3] == _STATE:
            if not isinstance(path[-2], str):
                raise CheckpointError(
                    f"'{name_of(path)}' is optimizer state by number; rank files need names, as "
                    "FSDP.optim_state_dict gives them"
                )
            if path[-2] in parameters and stored.shape == shapes.get(path[-2], stored.shape):
                cut.add(path)
    return cut
