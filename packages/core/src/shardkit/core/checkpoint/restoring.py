"""From a checkpoint into a training run: tensors in place, then everything else, and nothing if it does not fit."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.index import Index
from shardkit.core.checkpoint.leaves import LeafPath, flatten, name_of, unflatten
from shardkit.core.checkpoint.reading import read_objects, read_tensors
from shardkit.core.checkpoint.training_state import MODEL, OPTIMIZER, RNG, OptimizerNames, TrainingState, set_rng_state


def restore_state(directory: Path, index: Index, state: TrainingState, rank: int, world_size: int) -> None:
    """Fills this rank's part of a training state. Not collective.

    Values are read and verified first, then every part of the run gets its own. Raises CheckpointError if checkpoint
    and state do not fit; DamagedCheckpointError for a damaged file.
    """
    targets = _Targets(index)
    model_state = get_model_state_dict(state.model)
    targets.model(model_state)
    names = OptimizerNames.of(state.model, state.optimizers)
    if state.optimizers:
        targets.optimizer(names)
    live = {key: one.state_dict() for key, one in state.stateful()}
    for key, values in live.items():
        targets.like((key,), flatten(values, (key,)).values)
    own_ranks = _ranks_to_read(index, state, rank, world_size)
    for key, ranks in own_ranks.items():
        for other in ranks:
            targets.like((key, str(other)), {})
    read = targets.read(directory)

    # load_state_dict copies onto itself what was filled in place: hooks of modules see a load like any other.
    filled = _tree(read, index, (MODEL,))
    set_model_state_dict(state.model, {name: filled[name] for name in model_state})
    if state.optimizers:
        names.load(_tree(read, index, (OPTIMIZER,)))
    for key, one in state.stateful():
        one.load_state_dict(_counters_as(live[key], _tree(read, index, (key,))))
    for key, ranks in own_ranks.items():
        trees = {other: _tree(read, index, (key, str(other))) for other in ranks}
        if key == RNG:
            for tree in trees.values():
                set_rng_state(tree)
        elif index.world_size == world_size:
            state.per_rank[key].load_state_dict(trees[rank])
        else:
            state.per_rank[key].load_state_dicts(trees)  # type: ignore[attr-defined]  # _ranks_to_read has looked


class _Targets:
    """Tensors to be filled and objects to be read, by path."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._tensors: dict[LeafPath, torch.Tensor] = {}
        self._objects: list[str] = []

    def model(self, state: Mapping[str, Any]) -> None:
        """The tensors of the model into themselves; what its modules keep beside them as it was."""
        missing = [name for name in state if not _has(self._index, (MODEL, name))]
        if missing:
            listed = _listed(sorted(name_of((MODEL, name)) for name in missing))
            raise CheckpointError(f"the checkpoint does not fit the model: it lacks {listed}")
        for name, live in state.items():
            path = (MODEL, name)
            if name.endswith("_extra_state") or not isinstance(live, torch.Tensor):  # of any look
                self.like(path, flatten({name: live}, (MODEL,)).values)
            elif name_of(path) in self._index.tensors:
                self._tensors[path] = live  # what does not fit is refused when it is read
            else:
                raise CheckpointError(f"{name_of(path)} is a tensor in the model, but not in the checkpoint")

    def like(self, prefix: LeafPath, leaves: Mapping[LeafPath, Any]) -> None:
        """Everything under `prefix`; into the tensors among `leaves` where there are such of the same look."""
        stored = _entries(self._index, prefix)
        if not stored and leaves and prefix not in self._index.empties:
            raise CheckpointError(f"the checkpoint has nothing under '{name_of(prefix)}', which the state has")
        for path in stored:
            entry = self._index.tensors.get(name_of(path))
            live: Any = leaves.get(path)
            if entry is None:
                self._objects.append(name_of(path))
            elif isinstance(live, DTensor) or (
                isinstance(live, torch.Tensor) and (tuple(live.shape), live.dtype) == (entry.shape, entry.dtype)
            ):
                self._tensors[path] = live
            else:
                self._tensors[path] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")

    def optimizer(self, names: OptimizerNames) -> None:
        """Everything under "optimizer", into tensors that lie as their parameters do."""
        stored = _entries(self._index, (OPTIMIZER,))
        if not stored:
            raise CheckpointError(
                "the checkpoint has no optimizer state; restore TrainingState(model) alone to take its weights"
            )
        for path in stored:
            if path[1] == "state" and len(path) > 3 and str(path[2]) not in names.names:
                continue  # of a parameter that other ranks hold
            entry = self._index.tensors.get(name_of(path))
            if entry is None:
                self._objects.append(name_of(path))
            elif path[1] == "state" and len(path) == 4:
                self._tensors[path] = names.target(str(path[2]), str(path[3]), entry.dtype, entry.shape)
            elif path[1] == "state" and len(path) > 4 and entry.shape:
                self._tensors[path] = names.nested_target(str(path[2]), entry.dtype, entry.shape)
            else:
                self._tensors[path] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")

    def read(self, directory: Path) -> dict[LeafPath, Any]:
        """Reads it all: by path, the tensors that were filled, and objects, in the order in which they were saved."""
        objects = read_objects(directory, self._index, self._objects)
        read_tensors(directory, self._index, self._tensors.items())
        return self._index.in_order({**self._tensors, **objects})


def unexpected_names(index: Index, state: TrainingState) -> set[str]:
    """What the checkpoint has of a model that this rank's has not."""
    known = {name_of((MODEL, name)) for name in get_model_state_dict(state.model)}
    return {
        name_of(path)
        for path in _entries(index, (MODEL,))
        if name_of(path) not in known and name_of(path[:2]) not in known
    }


def _has(index: Index, path: LeafPath) -> bool:
    return name_of(path) in index.paths or path in index.empties or bool(_entries(index, path))


def _counters_as(live: Any, tree: Any) -> Any:
    """What was read, with a Counter wherever the live state has one: a scheduler's milestones are such."""
    if isinstance(live, Mapping) and isinstance(tree, dict):
        below = {key: _counters_as(live.get(key), one) for key, one in tree.items()}
        return Counter(below) if type(live) is Counter else below
    if isinstance(live, list) and isinstance(tree, list):
        return [_counters_as(*pair) for pair in itertools.zip_longest(live[: len(tree)], tree)]
    return tree


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def _entries(index: Index, prefix: LeafPath) -> list[LeafPath]:
    size = len(prefix)
    return [path for path in index.paths.values() if path[:size] == prefix]


def _tree(read: Mapping[LeafPath, Any], index: Index, prefix: LeafPath) -> Any:
    size = len(prefix)
    empties = [path[size:] for path in index.empties if path[:size] == prefix]
    return unflatten({path[size:]: value for path, value in read.items() if path[:size] == prefix}, empties)


def _ranks_to_read(index: Index, state: TrainingState, rank: int, world_size: int) -> dict[str, list[int]]:
    """Whose per-rank state this rank needs, by key. Raises CheckpointError if there is per-rank state of another number
    of ranks that cannot be shared out.
    """
    found: dict[str, list[int]] = {}
    for key, one in state.per_rank.items():
        stored = sorted(_ranks_of(index, key))
        if not stored:
            raise CheckpointError(f"the checkpoint has nothing under '{key}', which the state has per rank")
        if index.world_size == world_size:
            found[key] = [rank]
        elif hasattr(one, "load_state_dicts"):
            found[key] = stored
        else:
            raise CheckpointError(
                f"'{key}' was saved by {index.world_size} ranks, each its own, and there are {world_size} now: give "
                f"{type(one).__name__} a method load_state_dicts(states) that shares out the states of all ranks, or "
                "restore with as many ranks"
            )
        if missing := set(found[key]) - set(stored):
            raise DamagedCheckpointError(f"'{key}' of rank {min(missing)} is missing in the checkpoint")
    if state.rng and rank in _ranks_of(index, RNG):
        found[RNG] = [rank]
    return found


def _ranks_of(index: Index, key: str) -> set[int]:
    paths = [path for path in (*index.paths.values(), *index.empties) if path[0] == key and len(path) > 1]
    return {int(path[1]) for path in paths if isinstance(path[1], str) and path[1].isdecimal()}
