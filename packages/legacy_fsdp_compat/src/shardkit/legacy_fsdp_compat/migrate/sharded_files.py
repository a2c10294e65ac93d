"""Writes SHARDED checkpoints of one file a rank, as ranks of FSDP1 would, without ranks."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardkit.legacy_fsdp_compat.flat_layout import row_intervals
from shardkit.legacy_fsdp_compat.migrate.raw_bytes import bytes_of, payloads
from shardkit.legacy_fsdp_compat.migrate.stored import Checkpoint, CheckpointError, StoredTensor
from shardkit.legacy_fsdp_compat.migrate.trees import Path_, joined, places_of, tree_of
from shardkit.legacy_fsdp_compat.torch_compat import PickledShards

__all__ = ["Ranks", "ShardedWriter", "parameters_in_groups"]

_STATE = "state"


@dataclass(frozen=True)
class Ranks:
    """The ranks that rank files are for.

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
        if self.count < 2:
            raise CheckpointError(
                f"rank files for {self.count} rank(s): FSDP1 shards over two and more, and a single rank's state dicts "
                "are whole; convert to 'full'"
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


@dataclass(frozen=True)
class _Place:
    """Where a rank's part of a tensor lies in its file: elements [start, stop) of the whole, from this byte on."""

    start: int
    stop: int
    offset: int


class ShardedWriter:
    """`rank0.pt` and so on: torch.save of nested dicts with ShardedTensors, filled in piece by piece.

    Raises:
        CheckpointError: for optimizer state by number, and for parameters that are not in the checkpoint.
    """

    def __init__(self, directory: Path, checkpoint: Checkpoint, ranks: Ranks) -> None:
        self._checkpoint = checkpoint
        self._count = ranks.count
        self._files = [directory / f"rank{rank}.pt" for rank in range(ranks.count)]
        self.file = self._files[0]
        self._cut = _what_is_cut(checkpoint, ranks.parameters)
        self._places: list[dict[Path_, _Place]] = []

    def begin(self, records: dict[str, Any]) -> None:
        """Lays the files out, unless they are there with records in them."""
        if not records:
            for rank in reversed(range(self._count)):  # the first rank's last: with it all are there
                with torch.serialization.skip_data():
                    torch.save(self._tree(rank), self._files[rank])
        self._places = [self._find_places(rank) for rank in range(self._count)]

    def write(self, path: Path_, slabs: Iterator[tuple[int, int, torch.Tensor]]) -> dict[str, Any]:
        """Writes one tensor into every file that has a part of it; returns its record."""
        for low, high, values in slabs:
            for file, places in zip(self._files, self._places, strict=True):
                place = places.get(path)
                if place is None or not max(low, place.start) < min(high, place.stop):
                    continue
                start, stop = max(low, place.start), min(high, place.stop)
                with file.open("r+b") as opened:
                    opened.seek(place.offset + (start - place.start) * values.element_size())
                    opened.write(bytes_of(values[start - low : stop - low]))
        return {}

    def finish(self) -> None:
        """The files are complete once every tensor is written."""

    @staticmethod
    def kept(value: Any) -> Any:
        """An object as it is read back."""
        return value

    def _interval(self, path: Path_, rank: int) -> tuple[int, int]:
        stored = self._checkpoint.tensors[path]
        return row_intervals(stored.shape, self._count)[rank] if path in self._cut else (0, stored.numel)

    def _tree(self, rank: int) -> dict[str, Any]:
        values = {path: self._stand_in(path, stored, rank) for path, stored in self._checkpoint.tensors.items()}
        return tree_of({**values, **self._checkpoint.objects})

    def _stand_in(self, path: Path_, stored: StoredTensor, rank: int) -> Any:
        # Memory that is never touched is never there: these tensors only have sizes, and skip_data writes no values.
        if path not in self._cut:
            return torch.empty(stored.shape, dtype=stored.dtype)
        rest = stored.shape[1:]
        rows = [(low // stored.row, (high - low) // stored.row) for low, high in self._intervals(path) if high > low]
        boxes = [([first, *[0] * len(rest)], [count, *rest]) for first, count in rows]
        local = torch.empty(boxes[rank][1], dtype=stored.dtype) if rank < len(boxes) else None
        return PickledShards(local, torch.Size(stored.shape), stored.dtype, boxes, rank, self._count)

    def _intervals(self, path: Path_) -> list[tuple[int, int]]:
        return [self._interval(path, rank) for rank in range(self._count)]

    def _find_places(self, rank: int) -> dict[Path_, _Place]:
        found = payloads(self._files[rank])
        held = [
            path
            for path in places_of(self._checkpoint)
            if path not in self._cut or operator.lt(*self._interval(path, rank))
        ]
        # torch.save numbers storages in the order in which it meets them.
        return {path: _Place(*self._interval(path, rank), found[str(number)][0]) for number, path in enumerate(held)}


def _what_is_cut(checkpoint: Checkpoint, parameters: Collection[str]) -> set[Path_]:
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
                    f"'{joined(path)}' is optimizer state by number; rank files need names, as "
                    "FSDP.optim_state_dict gives them"
                )
            if path[-2] in parameters and stored.shape == shapes.get(path[-2], stored.shape):
                cut.add(path)
    return cut
