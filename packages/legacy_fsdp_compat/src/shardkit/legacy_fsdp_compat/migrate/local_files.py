"""LOCAL checkpoints: flat tensors cut into the parameters that they are made of, with shapes from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardkit.legacy_fsdp_compat.flat_layout import FlatLayout, aligned_numel
from shardkit.legacy_fsdp_compat.migrate.rank_files import RankFile, add_leaf, stored_shards
from shardkit.legacy_fsdp_compat.migrate.stored import (
    Checkpoint,
    CheckpointError,
    Part,
    Read,
    StoredTensor,
    joined,
    range_reader,
    whole,
)
from shardkit.legacy_fsdp_compat.migrate.torch_files import release_pages

__all__ = ["Shapes", "is_local", "local_checkpoint"]

FLAT_NAME = "_flat_param"

Shapes = Mapping[str, tuple[int, ...]]
"""Name -> shape of every parameter and buffer of the model, in order; tied parameters under their first name only."""


def is_local(files: Sequence[RankFile]) -> bool:
    """Whether the files hold flat tensors."""
    return any(path[-1].rpartition(".")[2] == FLAT_NAME for file in files for path in file.leaves)


@dataclass(frozen=True)
class _FlatUnit:
    """One FSDP module of the model that wrote the files."""

    key: tuple[str, ...]
    prefix: str
    flat: StoredTensor
    names: list[str]
    layout: FlatLayout


def local_checkpoint(files: list[RankFile], shapes: Shapes | None) -> Checkpoint:
    """A LOCAL checkpoint of one file a rank, with the ranks' own `optimizer.state_dict()` if it is there.

    Raises:
        CheckpointError: without shapes, or where they do not fit the flat tensors.
    """
    if shapes is None:
        raise CheckpointError(
            "a LOCAL checkpoint holds flat tensors and no shapes: pass them with --shapes FILE (any full checkpoint of "
            "the model, or JSON) or --model MODULE:FACTORY"
        )
    checkpoint = Checkpoint("LOCAL", [str(file.path) for file in files], len(files))
    flats = [path for path in files[0].leaves if path[-1].rpartition(".")[2] == FLAT_NAME]
    base = flats[0][:-1]
    views = _view_lengths(files, base, shapes)
    units = _units(files, flats, shapes, set(views))
    use_orig_params = bool(views)
    for unit in units:
        for index, name in enumerate(unit.names):
            checkpoint.tensors[(*base, name)] = _from_flat(unit, index, shapes[name])
    mine = {name for unit in units for name in unit.names}
    order = list(shapes)
    checkpoint.tensors = dict(sorted(checkpoint.tensors.items(), key=lambda item: order.index(item[0][-1])))
    for path in files[0].leaves:
        is_flat = path in flats or (path[:-1] == base and path[-1] in mine)
        if not is_flat and (path[:-1] == base or not _is_optimizer(path)):
            add_leaf(checkpoint, files, path)
    _add_optimizer(checkpoint, files, units, shapes, use_orig_params)
    return checkpoint


def _is_optimizer(path: tuple[str, ...]) -> bool:
    return "state" in path[:-1] or path[-1] == "param_groups"


def _view_lengths(files: list[RankFile], base: tuple[str, ...], shapes: Shapes) -> dict[str, list[int]]:
    """With use_orig_params=True: the length of each parameter's piece on each rank. Together they are the parameter,
    which tells pieces from buffers, of which every rank has all.
    """
    lengths: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        found = [file.leaves.get((*base, name)) for file in files]
        if not all(isinstance(one, torch.Tensor) and one.dim() == 1 for one in found):
            continue
        each = [one.numel() for one in found if isinstance(one, torch.Tensor)]
        if sum(each) == math.prod(shape):
            lengths[name] = each
    return lengths


def _units(files: list[RankFile], flats: list[tuple[str, ...]], shapes: Shapes, views: set[str]) -> list[_FlatUnit]:
    prefixes = {path: path[-1].removesuffix(FLAT_NAME) for path in flats}
    base = flats[0][:-1]
    buffers = {path[-1] for path in files[0].leaves if path[:-1] == base} - views
    units = []
    for path, prefix in prefixes.items():
        inner = [other for other in prefixes.values() if other != prefix and other.startswith(prefix)]
        names = [
            name
            for name in shapes
            if name.startswith(prefix) and not any(name.startswith(one) for one in inner) and name not in buffers
        ]
        flat = stored_shards(joined(path), files, path)
        units.append(_unit(path, prefix, flat, names, shapes, len(files), bool(views)))
    return units


def _unit(
    path: tuple[str, ...],
    prefix: str,
    flat: StoredTensor,
    names: list[str],
    shapes: Shapes,
    world_size: int,
    use_orig_params: bool,
) -> _FlatUnit:
    """The layout as long as the flat tensor. Mixed precision aligns by its own dtype, so several are tried."""
    sizes = (flat.dtype.itemsize, 2, 4, 8) if use_orig_params else (0,)
    tried = []
    for size in dict.fromkeys(sizes):
        layout = FlatLayout(
            tuple(tuple(shapes[name]) for name in names), world_size, aligned_numel(size) if size else 1
        )
        tried.append(layout.numel)
        if layout.numel == flat.numel:
            return _FlatUnit(path, prefix, flat, names, layout)
    described = {name: tuple(shapes[name]) for name in names}
    raise CheckpointError(
        f"'{joined(path)}' has {flat.numel} elements, but the parameters that the shapes list below '{prefix}' make "
        f"{' or '.join(map(str, dict.fromkeys(tried)))} on {world_size} ranks: {described}. Are these the shapes of "
        "the model that was saved, in its order, and are all ranks' files there?"
    )


def _from_flat(unit: _FlatUnit, index: int, shape: tuple[int, ...]) -> StoredTensor:
    start, stop = unit.layout.intervals[index]
    name = unit.names[index]
    parts = [
        Part(max(start, one.start) - start, min(stop, one.stop) - start, _shifted(one.read, start), one.file)
        for one in unit.flat.parts
        if max(start, one.start) < min(stop, one.stop)
    ]
    return StoredTensor(name, unit.flat.dtype, tuple(shape), tuple(parts))


def _shifted(read: Read, by: int) -> Read:
    return lambda low, high: read(low + by, high + by)


def _add_optimizer(
    checkpoint: Checkpoint, files: list[RankFile], units: list[_FlatUnit], shapes: Shapes, use_orig_params: bool
) -> None:
    """The optimizer's state: by name, or each rank's `optimizer.state_dict()` with numbers for parameters."""
    for path in [path for path in files[0].leaves if path[-1] == "param_groups"]:
        base = path[:-1]
        every = dict.fromkeys(key for file in files for key in file.leaves if key[: len(base)] == base)
        entries = [key for key in every if len(key) == len(base) + 3 and key[len(base)] == "state"]
        if not all(key[-2].isdigit() for key in entries):
            for key in every:
                if key not in checkpoint.tensors:
                    add_leaf(checkpoint, files, key)
            continue
        groups = files[0].leaves[path]
        numbered = _numbered(units, shapes, use_orig_params)
        _check_groups(groups, numbered, files[0])
        for key in entries:
            _add_state(checkpoint, files, units, key, numbered[int(key[-2])], shapes)
        checkpoint.objects[path] = [
            {**group, "params": [name for number in group["params"] for name in numbered[number]]} for group in groups
        ]


def _numbered(units: list[_FlatUnit], shapes: Shapes, use_orig_params: bool) -> list[list[str]]:
    """The parameters behind each number of the optimizer, which was built from model.parameters()."""
    if not use_orig_params:
        return [unit.names for unit in units]
    mine = {name for unit in units for name in unit.names}
    return [[name] for name in shapes if name in mine]


def _check_groups(groups: list[dict[str, Any]], numbered: list[list[str]], file: RankFile) -> None:
    """Numbers follow the groups, and only one group of all parameters follows the model."""
    count = sum(len(group["params"]) for group in groups)
    if len(groups) != 1 or count != len(numbered):
        raise CheckpointError(
            f"the optimizer in {file.path} has {count} parameters in {len(groups)} groups, the model {len(numbered)}; "
            "its numbers tell which is which only for one group of all parameters. Save it with FSDP.optim_state_dict, "
            "which writes names"
        )


def _add_state(
    checkpoint: Checkpoint,
    files: list[RankFile],
    units: list[_FlatUnit],
    where: tuple[str, ...],
    names: list[str],
    shapes: Shapes,
) -> None:
    """One value of one numbered parameter, for each of the `names` that this is."""
    found = [file.leaves[where] for file in files if file.leaves.get(where) is not None]
    unit = next(one for one in units if names[0] in one.names)
    for name in names:
        target = (*where[:-2], name, where[-1])
        if not found or not isinstance(found[0], torch.Tensor):
            checkpoint.objects[target] = found[0] if found else None
        elif found[0].dim() == 0:
            holder = next(file for file in files if where in file.leaves)
            checkpoint.tensors[target] = whole(joined(target), found[0], str(holder.path), release_pages)
        else:
            parts = [part for file in files for part in _state_part(unit, name, file, where, names == unit.names)]
            checkpoint.tensors[target] = StoredTensor(name, found[0].dtype, tuple(shapes[name]), tuple(parts))


def _state_part(unit: _FlatUnit, name: str, file: RankFile, where: tuple[str, ...], is_flat: bool) -> Iterator[Part]:
    """A rank's part of a state that is as long as its parameter: none, or one."""
    index, value = unit.names.index(name), file.leaves.get(where)
    low, high = unit.layout.piece(index, file.rank)
    if low == high:
        return
    expected = unit.layout.shard_numel if is_flat else high - low
    if not isinstance(value, torch.Tensor) or value.numel() != expected:
        seen = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else "no tensor"
        raise CheckpointError(
            f"'{joined(where)}' is {seen} in {file.path}, expected {expected} for its part of '{name}'; was the "
            "optimizer built from model.parameters()?"
        )
    # A flat parameter's state lies as it does; a piece's begins with the piece.
    inside = unit.layout.within_shard(index, file.rank)[0] if is_flat else 0
    yield Part(low, high, range_reader(value, low - inside, release_pages), str(file.path))
