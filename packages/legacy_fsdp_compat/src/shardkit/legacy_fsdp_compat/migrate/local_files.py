"""LOCAL checkpoints: parts of parameters, in flat tensors or beside them, combined with shapes from elsewhere.

With use_orig_params=True each rank's file lists its 1-D piece of every parameter, which determines everything.
Otherwise there is only one flat tensor for each FSDP module, without padding, and its layout follows from the shapes.
Optimizer state is stored by name beside them, or as each rank's `optimizer.state_dict()`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of, unflatten
from shardkit.core.checkpoint.stored import Checkpoint, Part, StoredTensor, mapped_reader, paths_of
from shardkit.legacy_fsdp_compat.flat_layout import FLAT_NAME, FlatLayout, Interval
from shardkit.legacy_fsdp_compat.migrate.rank_files import (
    RankFile,
    StoredShards,
    add_leaf,
    one_dtype,
    same_everywhere,
    stored_shards,
)
from shardkit.legacy_fsdp_compat.migrate.wrapping import ModelShapes, Wrapping, alignment_of, flat_key

_GROUPS, _STATE = "param_groups", "state"


@dataclass(frozen=True)
class Cut:
    """How one parameter, and its optimizer state, was cut over ranks."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Interval, ...]  # by rank, its elements of the parameter
    starts: tuple[int, ...]  # by rank, where they begin in the rank's optimizer state
    lengths: tuple[int, ...]  # by rank, the length of that state: the piece, or the rank's part of a flat tensor


def add_optimizer(checkpoint: Checkpoint, files: list[RankFile], base: LeafPath, units: list[list[Cut]]) -> None:
    """Adds the state of the optimizer at `base`; `units` has the parameters for each of its numbers. Raises
    CheckpointError if the numbers do not identify the parameters, or if the state does not fit.
    """
    mine = [path for file in files for path in file.leaves if path[: len(base)] == base]
    mine = [path for path in dict.fromkeys(mine) if path[len(base)] in (_GROUPS, _STATE)]
    groups = _groups(files[0], base)
    if all(isinstance(number, str) for group in groups for number in group["params"]):
        for path in mine:
            add_leaf(checkpoint, files, path)
        return
    _check_groups(groups, units, files[0])
    named = [{**one, "params": [cut.name for number in one["params"] for cut in units[number]]} for one in groups]
    for path, value in paths_of(named, (*base, _GROUPS)):
        checkpoint.add(path, value, files[0].path)
    entries = [path for path in mine if len(path) == len(base) + 3 and path[len(base)] == _STATE]
    for path in entries:
        _add_state(checkpoint, files, path, units[path[-2]])
    if not entries:
        checkpoint.objects[*base, _STATE] = {}


def _groups(file: RankFile, base: LeafPath) -> list[dict[str, Any]]:
    at = len(base)
    below = {path[at:]: value for path, value in file.leaves.items() if path[: at + 1] == (*base, _GROUPS)}
    groups: list[dict[str, Any]] = unflatten(below)[_GROUPS]
    return groups


def _check_groups(groups: list[dict[str, Any]], units: list[list[Cut]], file: RankFile) -> None:
    """Numbers follow the groups, and only a single group of all parameters is in the model's order."""
    numbers = [number for group in groups for number in group["params"]]
    if len(groups) != 1 or numbers != list(range(len(units))):
        raise CheckpointError(
            f"the optimizer in {file.path} has {len(numbers)} parameters in {len(groups)} groups, the model "
            f"{len(units)}; its numbers tell which is which only for one group of all parameters. Save it with "
            "FSDP.optim_state_dict, which writes names"
        )


def _add_state(checkpoint: Checkpoint, files: list[RankFile], where: LeafPath, cuts: list[Cut]) -> None:
    """Adds one value of one numbered parameter, for each parameter in it."""
    found = [file.leaves[where] for file in files if where in file.leaves]
    if len(cuts) == 1 and any(isinstance(one, StoredShards) for one in found):  # written by this package, as DTensors
        checkpoint.tensors[*where[:-2], cuts[0].name, where[-1]] = stored_shards(files, where)
        return
    is_cut = any(isinstance(one, torch.Tensor) and one.dim() > 0 for one in found)
    if not is_cut:
        same_everywhere(files, where)
    for cut in cuts:
        target = (*where[:-2], cut.name, where[-1])
        if is_cut:
            checkpoint.tensors[target] = _from_cut(files, where, cut, target)
        else:
            checkpoint.add(target, found[0], next(file.path for file in files if where in file.leaves))


def _from_cut(files: list[RankFile], where: LeafPath, cut: Cut, path: LeafPath) -> StoredTensor:
    """The tensor at `path`, as long as a parameter, whose parts lie at `where` in the ranks' files."""
    parts = []
    dtypes: dict[torch.dtype, Path] = {}  # and the first file that has it
    for file in files:
        low, high = cut.pieces[file.rank]
        if low == high:
            continue
        value: Any = file.leaves.get(where)
        expected = cut.lengths[file.rank]
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not is_plain or value.numel() != expected:
            seen = f"{value.numel()} elements" if is_plain else f"a {type(value).__name__}"
            raise CheckpointError(
                f"'{name_of(where)}' is {seen} in {file.path}, expected {expected} for its part of '{cut.name}'; was "
                "the optimizer built from model.parameters()?"
            )
        held = value.view(-1).narrow(0, cut.starts[file.rank], high - low)
        read = mapped_reader(name_of(where), held, str(file.path))
        parts.append(Part(low, high, read, (str(file.path),)))
        dtypes.setdefault(held.dtype, file.path)
    return StoredTensor(path, one_dtype(name_of(where), dtypes), cut.shape, tuple(parts))


_CANDIDATES = (None, "bfloat16", "float32", "float64", "float8_e4m3fn")
"""A `param_dtype` for each size of elements, for alignment follows the size alone."""


def found_config(files: list[RankFile], base: LeafPath, shapes: ModelShapes, cut: set[str]) -> dict[str, Any] | None:
    """The `--config` of the model at `base` whose parameters `cut` are sharded; None if FSDP1's own layouts do not
    explain the files.
    """
    names = shapes.given
    buffers = frozenset(name for name in names if shapes.ties.get(name, name) not in cut)
    units = _flats(files, base)
    use_orig_params = any((*base, name) in file.leaves for name in cut for file in files)
    try:
        wrapping = Wrapping(names, dict.fromkeys(units, (None,)), buffers, use_orig_params)
        if not use_orig_params:
            return wrapping.as_config()
        found = {unit: tuple(one for one in _CANDIDATES if _fits(files, base, wrapping, unit, one)) for unit in units}
        return Wrapping(names, found, buffers, True).as_config() if all(found.values()) else None
    except CheckpointError:  # ties across units, which only ours keeps
        return None


def _fits(files: list[RankFile], base: LeafPath, wrapping: Wrapping, unit: str, param_dtype: str | None) -> bool:
    """Whether every rank's pieces lie in its flat tensor as they would with this `param_dtype`."""
    names, path = wrapping.members[unit], (*base, flat_key(unit))
    dtype = files[0].leaves[path].dtype
    if param_dtype is not None and alignment_of(param_dtype, dtype) == alignment_of(None, dtype):
        return False  # that is already None
    shapes = ModelShapes.of(wrapping.shapes).own
    layout = FlatLayout(tuple(shapes[name] for name in names), len(files), alignment_of(param_dtype, dtype))
    return all(
        layout.numel == file.leaves[path].whole[0]
        and all(
            _lies_at(file.leaves[*base, name], file.leaves[path], *layout.within_shard(index, file.rank))
            for index, name in enumerate(names)
        )
        for file in files
    )


def _lies_at(piece: torch.Tensor, flat: StoredShards, low: int, high: int) -> bool:
    """Whether a piece is as long as [low, high), and begins there where it is a view of the flat tensor."""
    if piece.numel() != high - low or low == high:
        return piece.numel() == high - low
    ((_, tensor, _),) = flat.parts
    shared = piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return not shared or piece.storage_offset() - tensor.storage_offset() == low


def _is_flat(path: LeafPath) -> bool:
    return str(path[-1]).rpartition(".")[2] == FLAT_NAME


def _flats(files: list[RankFile], base: LeafPath) -> dict[str, LeafPath]:
    """The flat tensors of the model at `base`, by FSDP module."""
    paths = (path for file in files for path in file.leaves if path[:-1] == base and _is_flat(path))
    return {path[-1].removesuffix(FLAT_NAME).removesuffix("."): path for path in paths}


def is_local(files: Sequence[RankFile]) -> bool:
    return any(_is_flat(path) for file in files for path in file.leaves)


def local_checkpoint(files: list[RankFile], shapes: ModelShapes | None) -> Checkpoint:
    """A LOCAL checkpoint of one file for each rank, with the ranks' `optimizer.state_dict()` if present. Each dict with
    flat tensors is a model; the optimizer is assumed to belong to the first. Raises CheckpointError without shapes, or
    if they do not match the files.
    """
    if shapes is None:
        raise CheckpointError(
            "a LOCAL checkpoint holds flat tensors and no shapes: pass them with --shapes FILE (any full checkpoint of "
            "the model, or JSON) or --model MODULE:FUNCTION"
        )
    checkpoint = Checkpoint("LOCAL", [str(file.path) for file in files], len(files))
    bases = dict.fromkeys(path[:-1] for file in files for path in file.leaves if _is_flat(path))
    first, *_ = [_model(checkpoint, files, base, shapes) for base in bases]
    checkpoint.config = found_config(files, next(iter(bases)), shapes, {cut.name for unit in first for cut in unit})
    of_groups = (path for file in files for path in file.leaves if _GROUPS in path)
    optimizers = dict.fromkeys(path[: path.index(_GROUPS)] for path in of_groups)
    of_optimizers = tuple((*base, key) for base in optimizers for key in (_STATE, _GROUPS))
    for path in dict.fromkeys(path for file in files for path in file.leaves):
        if path[:-1] not in bases and not any(path[: len(one)] == one for one in of_optimizers):
            add_leaf(checkpoint, files, path)
    for base in optimizers:
        add_optimizer(checkpoint, files, base, first)
    return checkpoint


def _model(checkpoint: Checkpoint, files: list[RankFile], base: LeafPath, shapes: ModelShapes) -> list[list[Cut]]:
    """Adds one model's parameters and buffers, in order of the shapes; returns how its parameters were cut: a list for
    each parameter that the optimizer had.
    """
    beside = {path: value for file in files for path, value in file.leaves.items() if path[:-1] == base}
    here = {path[-1] for path, value in beside.items() if isinstance(value, torch.Tensor) and not _is_flat(path)}
    unknown = sorted(str(name) for name in here - shapes.given.keys())
    if unknown:
        raise CheckpointError(
            f"{files[0].path} and others hold {unknown} beside '{name_of((*base, FLAT_NAME))}', which the shapes lack. "
            "Add a parameter that is tied to another one to the shapes as well: in JSON as "
            '"name": "the other name"'
        )
    cuts = {name: cut for name in shapes.own if (cut := _piece_cut(files, (*base, name), shapes.own[name])) is not None}
    units = [[cut] for cut in cuts.values()]
    tensors = {name: _from_cut(files, (*base, name), cut, (*base, name)) for name, cut in cuts.items()}
    if not cuts:
        flats = {unit: stored_shards(files, path) for unit, path in _flats(files, base).items()}
        prefixes = tuple(f"{unit}." if unit else "" for unit in flats)
        # Names outside every FSDP module are buffers, even if the files lack them.
        buffers = here.union(name for name in shapes.own if not name.startswith(prefixes))
        wrapping = Wrapping(shapes.own, dict.fromkeys(flats, (None,)), frozenset(buffers), use_orig_params=False)
        units = [_flat_unit(tensors, files, flat, unit, wrapping) for unit, flat in flats.items()]
    for name in shapes.given:
        first = shapes.ties.get(name, name)
        if first in tensors:
            checkpoint.tensors[*base, name] = tensors[first]
            if first != name and first in cuts:
                _check_tie(files, base, name, tensors[first], cuts[first])
        elif name in here:
            add_leaf(checkpoint, files, (*base, name))
    for path, value in beside.items():
        if not isinstance(value, torch.Tensor):
            add_leaf(checkpoint, files, path)
    _check_shard_sizes(files, base, cuts)
    return units


def _check_tie(files: list[RankFile], base: LeafPath, name: str, first: StoredTensor, cut: Cut) -> None:
    """Checks a tie: with use_orig_params=True the files list a tied parameter under each of its names."""
    listed = [file for file in files if isinstance(file.leaves.get((*base, name)), torch.Tensor)]
    if not listed:
        return
    found = _piece_cut(files, (*base, name), cut.shape)
    path = (*base, name)
    if found is None or not _from_cut(files, path, found, path).same_values(first):
        raise CheckpointError(
            f"the shapes tie '{name_of((*base, name))}' to '{cut.name}', but {listed[0].path} and the files of the "
            "other ranks store different values for it: it was not tied. Give it its own shape"
        )


def _piece_cut(files: list[RankFile], path: LeafPath, shape: tuple[int, ...]) -> Cut | None:
    """With use_orig_params=True: how a parameter was cut, by its pieces. Together they are as long as it is, which
    tells pieces from buffers, of which every rank has all.
    """
    found = [file.leaves.get(path) for file in files]
    if not all(isinstance(one, torch.Tensor) and one.dim() == 1 for one in found):
        return None
    lengths = [one.numel() for one in found if isinstance(one, torch.Tensor)]
    if sum(lengths) != math.prod(shape) or not sum(lengths):
        return None
    ends = list(itertools.accumulate(lengths))
    pieces = tuple((end - length, end) for end, length in zip(ends, lengths, strict=True))
    return Cut(str(path[-1]), shape, pieces, (0,) * len(files), tuple(lengths))


def _check_shard_sizes(files: list[RankFile], base: LeafPath, cuts: dict[str, Cut]) -> None:
    """Checks that a rank's pieces are not longer than its part of the flat tensors, in which they lie."""
    flats = _flats(files, base).values()
    for file in files:
        parts = (part for path in flats for part in getattr(file.leaves.get(path), "parts", ()))
        held = sum(tensor.numel() for _, tensor, _ in parts)
        needed = sum(cut.lengths[file.rank] for cut in cuts.values())
        if needed > held:
            raise CheckpointError(
                f"{file.path} has {needed} elements of parameters and {held} in its flat tensors; are tied parameters "
                "listed among the shapes twice, or the files of several checkpoints?"
            )


def _flat_unit(
    tensors: dict[str, StoredTensor], files: list[RankFile], flat: StoredTensor, unit: str, wrapping: Wrapping
) -> list[Cut]:
    """One FSDP module of a model with use_orig_params=False: adds its parameters to `tensors`."""
    shapes = {name: wrapping.known.own[name] for name in wrapping.members[unit]}
    layout = wrapping.layout(unit, len(files), flat.dtype)
    if layout.numel != flat.numel:
        raise CheckpointError(
            f"'{flat.name}' has {flat.numel} elements in {files[0].path} and others, the parameters that the shapes "
            f"have below '{unit}' make {layout.numel}: {list(shapes.items())}. Give the shapes of the model that "
            "was saved, in its order, and mark tied parameters (in JSON as "
            '"name": "the other name"; --model finds them), but not those of two FSDP modules: FSDP1 keeps a copy in '
            "each, with a shape of its own"
        )
    ranks = range(len(files))
    cuts = []
    for index, (name, shape) in enumerate(shapes.items()):
        read = partial(_shifted, flat, layout.intervals[index][0])
        tensors[name] = StoredTensor.of((name,), flat.dtype, shape, read, flat.files)
        starts = tuple(layout.within_shard(index, rank)[0] for rank in ranks)
        cuts.append(Cut(name, shape, layout.pieces(index), starts, (layout.shard_numel,) * len(files)))
    return cuts


def _shifted(flat: StoredTensor, by: int, low: int, high: int) -> torch.Tensor:
    return flat.read(low + by, high + by)
