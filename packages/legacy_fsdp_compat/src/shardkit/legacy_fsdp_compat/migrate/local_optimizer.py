"""Optimizer state beside LOCAL checkpoints: by name, or each rank's `optimizer.state_dict()`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of, unflatten
from shardkit.core.checkpoint.stored import Checkpoint, Part, StoredTensor, paths_of
from shardkit.core.checkpoint.strided import mapped_reader, whole
from shardkit.legacy_fsdp_compat.flat_layout import Interval
from shardkit.legacy_fsdp_compat.migrate.rank_files import RankFile, add_leaf, same_everywhere, stored_shards
from shardkit.legacy_fsdp_compat.migrate.torch_files import StoredShards

__all__ = ["Cut", "add_optimizer", "optimizer_bases"]

_GROUPS, _STATE = "param_groups", "state"


@dataclass(frozen=True)
class Cut:
    """How one parameter, and what an optimizer keeps for it, was cut over ranks.

    Attributes:
        name: of the parameter.
        shape: of it.
        pieces: by rank, which of its elements.
        starts: by rank, where they begin in what the rank's optimizer keeps.
        lengths: by rank, how long that is: the piece, or the rank's part of a flat tensor.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Interval, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]


def optimizer_bases(files: list[RankFile]) -> list[LeafPath]:
    """Where optimizers are: what holds "param_groups"."""
    found = (path[: path.index(_GROUPS)] for file in files for path in file.leaves if _GROUPS in path)
    return list(dict.fromkeys(found))


def add_optimizer(checkpoint: Checkpoint, files: list[RankFile], base: LeafPath, units: list[list[Cut]]) -> None:
    """Adds the state of the optimizer at `base`; `units` has the parameters behind each of its numbers.

    Raises:
        CheckpointError: for numbers that do not tell which parameter is which, and for state that does not fit.
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
        _put(checkpoint, path, value, files[0])
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
    """Numbers follow the groups, and only one group of all parameters follows the model."""
    numbers = [number for group in groups for number in group["params"]]
    if len(groups) != 1 or numbers != list(range(len(units))):
        raise CheckpointError(
            f"the optimizer in {file.path} has {len(numbers)} parameters in {len(groups)} groups, the model "
            f"{len(units)}; its numbers tell which is which only for one group of all parameters. Save it with "
            "FSDP.optim_state_dict, which writes names"
        )


def _put(checkpoint: Checkpoint, path: LeafPath, value: Any, file: RankFile) -> None:
    if isinstance(value, torch.Tensor):
        checkpoint.tensors[path] = whole(path, value, str(file.path))
    else:
        checkpoint.objects[path] = value


def _add_state(checkpoint: Checkpoint, files: list[RankFile], where: LeafPath, cuts: list[Cut]) -> None:
    """One value of one numbered parameter, for each parameter that this is."""
    found = [file.leaves[where] for file in files if where in file.leaves]
    if len(cuts) == 1 and any(isinstance(one, StoredShards) for one in found):  # written by this package, as DTensors
        target = (*where[:-2], cuts[0].name, where[-1])
        checkpoint.tensors[target] = stored_shards(name_of(target), files, where)
        return
    is_cut = any(isinstance(one, torch.Tensor) and one.dim() > 0 for one in found)
    if not is_cut:
        same_everywhere(files, where)
    for cut in cuts:
        target = (*where[:-2], cut.name, where[-1])
        if not is_cut:
            _put(checkpoint, target, found[0], next(file for file in files if where in file.leaves))
            continue
        parts = tuple(part for file in files for part in _part(cut, file, where))
        checkpoint.tensors[target] = StoredTensor(target, found[0].dtype, cut.shape, parts)


def _part(cut: Cut, file: RankFile, where: LeafPath) -> Iterator[Part]:
    """A rank's part of a state that is as long as its parameter: none, or one."""
    low, high = cut.pieces[file.rank]
    if low == high:
        return
    value, expected = file.leaves.get(where), cut.lengths[file.rank]
    if type(value) is not torch.Tensor or value.numel() != expected:
        seen = f"{value.numel()} elements" if type(value) is torch.Tensor else f"a {type(value).__name__}"
        raise CheckpointError(
            f"'{name_of(where)}' is {seen} in {file.path}, expected {expected} for its part of '{cut.name}'; was the "
            "optimizer built from model.parameters()?"
        )
    read = mapped_reader(name_of(where), value.view(-1), low - cut.starts[file.rank], str(file.path))
    yield Part(low, high, read, str(file.path))
