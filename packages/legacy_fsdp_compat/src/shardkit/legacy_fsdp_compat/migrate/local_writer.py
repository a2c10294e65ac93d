"""Writes LOCAL checkpoints of one file a rank: FSDP1's flat parameters, with its alignment and padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of
from shardkit.core.checkpoint.stored import Checkpoint
from shardkit.core.checkpoint.torch_writer import Content, Place
from shardkit.legacy_fsdp_compat.flat_layout import PADDING_VALUE, FlatLayout
from shardkit.legacy_fsdp_compat.migrate.model_shapes import ModelShapes, check_shapes
from shardkit.legacy_fsdp_compat.migrate.sharded_files import Ranks, ShardedWriter, check_count
from shardkit.legacy_fsdp_compat.migrate.wrapping import Wrapping
from shardkit.legacy_fsdp_compat.torch_compat import PickledShards

__all__ = ["LocalRanks", "LocalWriter"]


@dataclass(frozen=True)
class LocalRanks:
    """The ranks that LOCAL rank files are for, and how the model is wrapped on them.

    Raises:
        CheckpointError: for fewer than two ranks.
    """

    count: int
    wrapping: Wrapping

    def __post_init__(self) -> None:
        check_count(self.count)


@dataclass(frozen=True)
class _Unit:
    """One FSDP module of one model of the checkpoint.

    Attributes:
        base: where the model is.
        names: of its parameters, in order.
        layout: of its flat parameter.
        dtype: of it.
    """

    base: LeafPath
    names: list[str]
    layout: FlatLayout
    dtype: torch.dtype


class LocalWriter(ShardedWriter):
    """`rank0.pt` and so on as FSDP1's LOCAL_STATE_DICT, optimizer state by name beside it.

    What stock's files hold twice lies once in the file, here as there: with use_orig_params=True a parameter's piece
    is a view of the flat parameter.

    Raises:
        CheckpointError: for a checkpoint that the wrapping does not fit, and units of several dtypes.
    """

    def __init__(self, directory: Path, checkpoint: Checkpoint, ranks: LocalRanks) -> None:
        super().__init__(directory, checkpoint, Ranks(ranks.count, ranks.wrapping.parameters))
        self._wrapping = ranks.wrapping
        check_shapes(checkpoint, ranks.wrapping.known)
        bases = dict.fromkeys(path[:-1] for path in checkpoint.tensors if path[-1] in ranks.wrapping.known.given)
        self._check_ties(bases)
        self._check_parted()
        self._units = {base: {unit: self._unit(base, unit) for unit in ranks.wrapping.units} for base in bases}

    def _check_ties(self, bases: Iterable[LeafPath]) -> None:
        """What is tied lies in the files once."""
        for name, first in self._wrapping.known.ties.items():
            for base in bases:
                one, other = (self._checkpoint.tensors[*base, each] for each in (name, first))
                if one is not other and not one.same_values(other):
                    raise CheckpointError(
                        f"'{name_of((*base, name))}' is tied to '{first}' in the model, but has other values in the "
                        "checkpoint: only one of them can be written; give it a shape of its own, or another wrapping"
                    )

    def _check_parted(self) -> None:
        """FSDP1 loads state for all parameters of an FSDP module, or for none."""
        paths = (*self._checkpoint.tensors, *self._checkpoint.objects)
        states = {path[:-1] for path in paths if len(path) > 2 and path[-3] == "state"}
        for name, first in ModelShapes.of(self._wrapping.shapes).ties.items():
            lacking = [path for path in states if path[-1] == first and (*path[:-1], name) not in states]
            if name in self._wrapping.known.own and lacking:
                raise CheckpointError(
                    f"'{name}' is tied to '{first}' of another FSDP module, which FSDP1 parts, but the checkpoint has "
                    f"optimizer state for '{name_of(lacking[0])}' alone; leave the optimizer out (--without "
                    f"{name_of(lacking[0][:-2])})"
                )

    def _unit(self, base: LeafPath, unit: str) -> _Unit:
        names = self._wrapping.members[unit]
        dtypes = {name: self._checkpoint.tensors[*base, name].dtype for name in names}
        if len(set(dtypes.values())) != 1:
            raise CheckpointError(
                f"a LOCAL checkpoint keeps one flat tensor for each FSDP module, but '{name_of((*base, unit))}' has "
                f"parameters of {len(set(dtypes.values()))} dtypes: {dtypes}"
            )
        dtype = next(iter(dtypes.values()))
        return _Unit(base, names, self._wrapping.layout(unit, self._count, dtype), dtype)

    def content(self, number: int) -> Content:
        """Flat parameters, rows of what is cut besides, and all of everything else."""
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
        """A rank's part of a flat parameter, as long as every other's: the last ones end in zeros that nobody reads."""
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
    """A rank's piece of each parameter; stock has one empty tensor for those that the rank has nothing of."""
    empty = torch.empty(0, dtype=unit.dtype)
    found = {}
    for index, name in enumerate(unit.names):
        low, high = unit.layout.within_shard(index, rank)
        found[name] = flat[low:high] if low < high else empty
    return found


def _flat_shards(unit: _Unit, flat: torch.Tensor, rank: int) -> PickledShards:
    """The entry of the flat parameter. It requires grad, as that of parameters that train; no loader asks."""
    layout = unit.layout
    shards = [layout.shard(one) for one in range(layout.world_size)]
    boxes = [([start], [stop - start]) for start, stop in shards if start < stop]
    local = flat[: boxes[rank][1][0]].requires_grad_() if rank < len(boxes) else None
    size = torch.Size([layout.numel])
    return PickledShards(local, size, unit.dtype, boxes, rank, layout.world_size, requires_grad=True)
