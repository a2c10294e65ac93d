"""Writes checkpoints of one file for each rank, as ranks of FSDP1 would: SHARDED, and LOCAL with its flat parameters,
their alignment and padding. No ranks are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of
from shardkit.core.checkpoint.stored import Checkpoint, StoredTensor
from shardkit.core.checkpoint.writers import Content, Place, TorchWriter
from shardkit.legacy_fsdp_compat.flat_layout import PADDING_VALUE, FlatLayout, row_intervals
from shardkit.legacy_fsdp_compat.migrate.wrapping import Wrapping, check_shapes
from shardkit.legacy_fsdp_compat.torch_compat import PickledShards

_STATE = "state"


@dataclass(frozen=True)
class _Ranks:
    count: int

    def __post_init__(self) -> None:
        if self.count < 2:
            raise CheckpointError(
                f"rank files for {self.count} rank{'s' * (self.count != 1)}: FSDP1 shards over two and more, and a "
                "single rank's state dicts are whole; convert to 'full'"
            )


@dataclass(frozen=True)
class Ranks(_Ranks):
    """The ranks that SHARDED rank files are written for.

    Attributes:
        count: number of ranks; fewer than two raise CheckpointError.
        parameters: names of the model's parameters. Only these, and optimizer state for each of their elements, are
            cut. A checkpoint does not distinguish them from buffers, which every rank holds whole.
    """

    parameters: Collection[str]


@dataclass(frozen=True)
class LocalRanks(_Ranks):
    """The ranks that LOCAL rank files are written for, and how the model is wrapped on them; `count` as in `Ranks`."""

    wrapping: Wrapping

    @property
    def parameters(self) -> Collection[str]:
        """Names of the model's parameters, including tied ones."""
        return self.wrapping.parameters


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
    """`rank0.pt` and so on, nested dicts with ShardedTensors. Raises CheckpointError for optimizer state by number, and
    for parameters that the checkpoint lacks.
    """

    def __init__(self, directory: Path, checkpoint: Checkpoint, ranks: Ranks | LocalRanks) -> None:
        super().__init__(directory, checkpoint, [f"rank{rank}.pt" for rank in range(ranks.count)])
        self._count = ranks.count
        self._cut = _what_is_cut(checkpoint, ranks.parameters)

    def memory_in(self, leaf: Any) -> torch.Tensor | None:
        """The tensor that stands for a leaf in the pickle."""
        return leaf.local if isinstance(leaf, PickledShards) else super().memory_in(leaf)

    def content(self, number: int) -> Content:
        """The rank's rows of cut tensors, and all other values whole."""
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
        raise CheckpointError(
            f"the checkpoint lacks the parameters {missing[:5]} ({len(missing)} in all); build the model that was saved"
        )
    cut = set()
    for path, stored in checkpoint.tensors.items():
        if not stored.numel or not stored.shape:
            continue
        if path[-1] in parameters:
            cut.add(path)
        elif len(path) > 2 and path[-3] == _STATE:
            if not isinstance(path[-2], str):
                raise CheckpointError(
                    f"'{name_of(path)}' is optimizer state by number; save names, as FSDP.optim_state_dict gives them"
                )
            if path[-2] in parameters and stored.shape == shapes.get(path[-2], stored.shape):
                cut.add(path)
    return cut


@dataclass(frozen=True)
class _Unit:
    """One FSDP module of one model of the checkpoint."""

    base: LeafPath  # path of the model
    names: list[str]  # names of its parameters, in order
    layout: FlatLayout  # layout of its flat parameter
    dtype: torch.dtype  # dtype of its flat parameter


class LocalWriter(ShardedWriter):
    """`rank0.pt` and so on as FSDP1's LOCAL_STATE_DICT, with optimizer state by name.

    Values that stock's files hold twice are stored once, as in stock: with use_orig_params=True a parameter's piece is
    a view of the flat parameter. Raises CheckpointError if the wrapping does not match the checkpoint, or a unit has
    several dtypes.
    """

    def __init__(self, directory: Path, checkpoint: Checkpoint, ranks: LocalRanks) -> None:
        super().__init__(directory, checkpoint, ranks)
        self._wrapping = ranks.wrapping
        check_shapes(checkpoint, ranks.wrapping.known)
        bases = dict.fromkeys(path[:-1] for path in checkpoint.tensors if path[-1] in ranks.wrapping.known.given)
        self._check_ties(bases)
        self._units = {base: {unit: self._unit(base, unit) for unit in ranks.wrapping.units} for base in bases}

    def _check_ties(self, bases: Iterable[LeafPath]) -> None:
        """Checks that tied parameters occur once in the files."""
        for name, first in self._wrapping.known.ties.items():
            for base in bases:
                one, other = (self._checkpoint.tensors[*base, each] for each in (name, first))
                if one is not other and not one.same_values(other):
                    raise CheckpointError(
                        f"'{name_of((*base, name))}' is tied to '{first}' in the model, but has other values in the "
                        "checkpoint: only one of them can be written; give it a shape of its own, or another wrapping"
                    )

    def _unit(self, base: LeafPath, unit: str) -> _Unit:
        names = self._wrapping.members[unit]
        dtypes = {name: self._checkpoint.tensors[*base, name].dtype for name in names}
        if len(set(dtypes.values())) != 1:
            raise CheckpointError(
                f"a LOCAL checkpoint keeps one flat tensor for each FSDP module, but '{name_of((*base, unit))}' has "
                f"parameters of {len(set(dtypes.values()))} dtypes: {dtypes}; "
                "wrap them separately"
            )
        dtype = next(iter(dtypes.values()))
        return _Unit(base, names, self._wrapping.layout(unit, self._count, dtype), dtype)

    def content(self, number: int) -> Content:
        """The rank's part of flat parameters, its rows of other cut tensors, and all other values whole."""
        content = Content()
        done: set[LeafPath] = set()
        for path, stored in self._checkpoint.tensors.items():
            base = path[:-1]
            if base not in self._units:
                self._add(content, path, stored, number)
            elif base not in done:
                done.add(base)
                self._add_model(content, base, number)
        content.leaves.update(self._checkpoint.objects)
        return content

    def _add_model(self, content: Content, base: LeafPath, rank: int) -> None:
        flats = {unit: self._flat(content, described, rank) for unit, described in self._units[base].items()}
        pieces: dict[str, torch.Tensor] = {}
        for unit, described in self._units[base].items():
            pieces.update(_pieces(described, flats[unit], rank))
        ties = self._wrapping.known.ties
        for key, unit_or_none in self._wrapping.entries():
            path = (*base, key)
            if unit_or_none is not None:
                described = self._units[base][unit_or_none]
                content.leaves[path] = _flat_shards(described, flats[unit_or_none], rank)
            elif key in self._wrapping.buffers:
                self._add(content, path, self._checkpoint.tensors[path], rank)
            else:
                content.leaves[path] = pieces[ties.get(key, key)]

    def _flat(self, content: Content, unit: _Unit, rank: int) -> torch.Tensor:
        """A rank's part of a flat parameter, equally long on all ranks: the last ones end in unused zeros."""
        layout = unit.layout
        flat = torch.empty(layout.shard_numel, dtype=unit.dtype)
        held = []
        for index, name in enumerate(unit.names):
            low, high = layout.within_shard(index, rank)
            if low < high:
                content.places[*unit.base, name] = Place(*layout.piece(index, rank), flat, low)
                held.append((low, high))
        start, stop = layout.shard(rank)
        edges = [0, *itertools.chain.from_iterable(held), stop - start]
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            if first < last:
                content.padding.append((flat, first, last, PADDING_VALUE))
        return flat


def _pieces(unit: _Unit, flat: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
    """A rank's piece of each parameter; as in stock, parameters without elements on it share one empty tensor."""
    empty = torch.empty(0, dtype=unit.dtype)
    found = {}
    for index, name in enumerate(unit.names):
        low, high = unit.layout.within_shard(index, rank)
        found[name] = flat[low:high] if low < high else empty
    return found


def _flat_shards(unit: _Unit, flat: torch.Tensor, rank: int) -> PickledShards:
    """The entry of the flat parameter. It requires grad, like a trainable parameter; no loader checks."""
    layout = unit.layout
    shards = [layout.shard(one) for one in range(layout.world_size)]
    boxes = [([start], [stop - start]) for start, stop in shards if start < stop]
    local = flat[: boxes[rank][1][0]].requires_grad_() if rank < len(boxes) else None
    size = torch.Size([layout.numel])
    return PickledShards(local, size, unit.dtype, boxes, rank, layout.world_size, requires_grad=True)
