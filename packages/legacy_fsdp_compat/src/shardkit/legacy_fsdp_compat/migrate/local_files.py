"""LOCAL checkpoints: parts of parameters, in flat tensors or beside them, put together with shapes from elsewhere.

With use_orig_params=True each rank's file lists its 1-D piece of every parameter, which says all that must be known.
Otherwise there is only one flat tensor for each FSDP module, without padding, and its layout follows from the shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of
from shardkit.core.checkpoint.stored import Checkpoint, Part, Read, StoredTensor
from shardkit.core.checkpoint.strided import mapped_reader
from shardkit.legacy_fsdp_compat.flat_layout import FLAT_NAME, FlatLayout
from shardkit.legacy_fsdp_compat.migrate.local_config import found_config
from shardkit.legacy_fsdp_compat.migrate.local_optimizer import Cut, add_optimizer, optimizer_bases
from shardkit.legacy_fsdp_compat.migrate.model_shapes import ModelShapes
from shardkit.legacy_fsdp_compat.migrate.rank_files import RankFile, add_leaf, stored_shards
from shardkit.legacy_fsdp_compat.migrate.wrapping import Wrapping

__all__ = ["is_local", "local_checkpoint"]


def _is_flat(path: LeafPath) -> bool:
    return str(path[-1]).rpartition(".")[2] == FLAT_NAME


def is_local(files: Sequence[RankFile]) -> bool:
    """Whether the files hold flat tensors."""
    return any(_is_flat(path) for file in files for path in file.leaves)


def local_checkpoint(files: list[RankFile], shapes: ModelShapes | None) -> Checkpoint:
    """A LOCAL checkpoint of one file a rank, with the ranks' own `optimizer.state_dict()` if it is there. Each dict
    with flat tensors is a model; the optimizer is taken for that of the first.

    Raises:
        CheckpointError: without shapes, or where they do not fit the files.
    """
    if shapes is None:
        raise CheckpointError(
            "a LOCAL checkpoint holds flat tensors and no shapes: pass them with --shapes FILE (any full checkpoint of "
            "the model, or JSON) or --model MODULE:FACTORY"
        )
    checkpoint = Checkpoint("LOCAL", [str(file.path) for file in files], len(files))
    bases = dict.fromkeys(path[:-1] for file in files for path in file.leaves if _is_flat(path))
    models = [_model(checkpoint, files, base, shapes) for base in bases]
    known, first = models[0]
    checkpoint.config = found_config(files, next(iter(bases)), known, {cut.name for unit in first for cut in unit})
    optimizers = optimizer_bases(files)
    of_optimizers = tuple((*base, key) for base in optimizers for key in ("state", "param_groups"))
    for path in dict.fromkeys(path for file in files for path in file.leaves):
        if path[:-1] not in bases and not any(path[: len(one)] == one for one in of_optimizers):
            add_leaf(checkpoint, files, path)
    for base in optimizers:
        add_optimizer(checkpoint, files, base, first)
    return checkpoint


def _model(
    checkpoint: Checkpoint, files: list[RankFile], base: LeafPath, shapes: ModelShapes
) -> tuple[ModelShapes, list[list[Cut]]]:
    """Adds one model's parameters and buffers, in order of the shapes; returns these as the files have ties, and how
    its parameters were cut: a list for each parameter that the optimizer had.
    """
    beside = {path: value for file in files for path, value in file.leaves.items() if path[:-1] == base}
    here = {path[-1] for path, value in beside.items() if isinstance(value, torch.Tensor) and not _is_flat(path)}
    unknown = sorted(str(name) for name in here - shapes.names)
    if unknown:
        raise CheckpointError(
            f"{files[0].path} and others hold {unknown} beside '{name_of((*base, FLAT_NAME))}', which the shapes lack. "
            "A parameter that is tied to another one stands among the shapes as well: in JSON as "
            '"name": "the other name"'
        )
    cuts = {name: cut for name in shapes.own if (cut := _piece_cut(files, (*base, name), shapes.own[name])) is not None}
    units = [[cut] for cut in cuts.values()]
    tensors = {name: _from_pieces(files, (*base, name), cut) for name, cut in cuts.items()}
    if not cuts:
        flats = [path for path in beside if _is_flat(path)]
        shapes = _with_ties_of_files(checkpoint, files, flats, shapes, here)
        for path in flats:
            units.append(_flat_unit(tensors, files, path, shapes, here))
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
    return shapes, units


def _check_tie(files: list[RankFile], base: LeafPath, name: str, first: StoredTensor, cut: Cut) -> None:
    """With use_orig_params=True the files list a tied parameter under each of its names."""
    listed = [file for file in files if isinstance(file.leaves.get((*base, name)), torch.Tensor)]
    if not listed:
        return
    found = _piece_cut(files, (*base, name), cut.shape)
    if found is None or not _from_pieces(files, (*base, name), found).same_values(first):
        raise CheckpointError(
            f"'{name_of((*base, name))}' is tied to '{cut.name}', say the shapes, but {listed[0].path} and the others "
            "hold other values for it: it was a parameter of its own, which has a shape of its own"
        )


def _with_ties_of_files(
    checkpoint: Checkpoint, files: list[RankFile], flats: list[LeafPath], shapes: ModelShapes, buffers: set[str]
) -> ModelShapes:
    """Of parameters that are tied across FSDP modules FSDP1 keeps a copy in each, which then train apart; ours stay
    tied. How long the flat tensors are says which it was.
    """
    if not shapes.ties:
        return shapes
    names = {str(path[-1]).removesuffix(FLAT_NAME).removesuffix("."): path for path in flats}
    prefixes = tuple(path[-1].removesuffix(FLAT_NAME) for path in flats)
    # What lies in no FSDP module is a buffer, also one that the files lack.
    outside = frozenset(name for name in shapes.given if not name.startswith(prefixes))
    wrapping = Wrapping(shapes.given, dict.fromkeys(names, (None,)), outside | buffers, use_orig_params=False)
    of_flats = {unit: stored_shards(name_of(path), files, path) for unit, path in names.items()}
    if not wrapping.parted or any(
        wrapping.layout(u, len(files), one.dtype).numel != one.numel for u, one in of_flats.items()
    ):
        return shapes
    for name, first in wrapping.parted.items():
        checkpoint.notes.append(
            f"'{name}' is tied to '{first}' of another FSDP module in the model, but not in the files, as "
            "FSDP1 has trained them apart; both are converted"
        )
    return wrapping.known


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
    """Pieces lie in the flat tensors, so a rank cannot have more of them than its part of those is long."""
    for file in files:
        flats = [value for path, value in file.leaves.items() if path[:-1] == base and _is_flat(path)]
        held = sum(tensor.numel() for value in flats for _, tensor, _ in getattr(value, "parts", ()))
        needed = sum(cut.lengths[file.rank] for cut in cuts.values())
        if needed > held:
            raise CheckpointError(
                f"{file.path} has {needed} elements of parameters and {held} in its flat tensors; are tied parameters "
                "listed among the shapes twice, or the files of several checkpoints?"
            )


def _from_pieces(files: list[RankFile], path: LeafPath, cut: Cut) -> StoredTensor:
    name = name_of(path)
    parts = [
        Part(low, high, mapped_reader(name, file.leaves[path], low, str(file.path)), str(file.path))
        for file in files
        for low, high in [cut.pieces[file.rank]]
        if low < high
    ]
    return StoredTensor(path, files[0].leaves[path].dtype, cut.shape, tuple(parts))


def _flat_unit(
    tensors: dict[str, StoredTensor], files: list[RankFile], path: LeafPath, shapes: ModelShapes, buffers: set[str]
) -> list[Cut]:
    """One FSDP module of a model with use_orig_params=False: adds its parameters to `tensors`."""
    flat = stored_shards(name_of(path), files, path)
    prefix = path[-1].removesuffix(FLAT_NAME)
    others = {one[-1].removesuffix(FLAT_NAME) for file in files for one in file.leaves if _is_flat(one)}
    inner = tuple(other for other in others if other != prefix and other.startswith(prefix))
    names = [
        name for name in shapes.own if name.startswith(prefix) and not name.startswith(inner) and name not in buffers
    ]
    layout = FlatLayout(tuple(shapes.own[name] for name in names), len(files))
    if layout.numel != flat.numel:
        raise CheckpointError(
            f"'{name_of(path)}' has {flat.numel} elements in {files[0].path} and others, the parameters that the "
            f"shapes have below '{prefix}' make {layout.numel}: {[(name, shapes.own[name]) for name in names]}. Are "
            "these the shapes of the model that was saved, in its order, and are tied parameters marked (in JSON as "
            '"name": "the other name"; --model finds them)?'
        )
    for name, (start, stop) in zip(names, layout.intervals, strict=True):
        tensors[name] = _from_flat(flat, name, shapes.own[name], start, stop)
    ranks = range(len(files))
    return [
        Cut(
            name,
            shapes.own[name],
            layout.pieces(index),
            tuple(layout.within_shard(index, rank)[0] for rank in ranks),
            (layout.shard_numel,) * len(files),
        )
        for index, name in enumerate(names)
    ]


def _from_flat(flat: StoredTensor, name: str, shape: tuple[int, ...], start: int, stop: int) -> StoredTensor:
    parts = [
        Part(max(start, one.start) - start, min(stop, one.stop) - start, _shifted(one.read, start), one.file)
        for one in flat.parts
        if max(start, one.start) < min(stop, one.stop)
    ]
    return StoredTensor((name,), flat.dtype, shape, tuple(parts))


def _shifted(read: Read, by: int) -> Read:
    return lambda low, high: read(low + by, high + by)
