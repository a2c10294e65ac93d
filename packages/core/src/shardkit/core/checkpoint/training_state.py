"""The contents of a checkpoint: a training run as leaves whose names do not depend on the ranks, and back.

Optimizer state is stored by parameter name, as in `get_optimizer_state_dict`, but without its extra step: stock
initialises an optimizer without state by a step, so it counts one step too many. Here existing state is named as it is,
and state to be read is created from the checkpoint's entries.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.index import Index, TensorEntry
from shardkit.core.checkpoint.leaves import (
    MODEL,
    OPTIMIZER,
    RNG,
    SCHEDULER,
    Captured,
    LeafPath,
    Leaves,
    flatten,
    name_of,
    unflatten,
)
from shardkit.core.checkpoint.location import Location
from shardkit.core.checkpoint.reading import read_objects, read_tensors
from shardkit.core.optimizer_steps.block_steps import target_by_block
from shardkit.core.optimizer_steps.plain_steps import NUMBERS, plain_steps_of
from shardkit.core.parameters.placements import Owned, is_ours
from shardkit.core.torch_compat import local_of


def get_rng_state() -> dict[str, Any]:
    """The states of all generators, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores the result of `get_rng_state`; a generator that is missing there keeps its state."""
    try:
        if "cpu" in state:
            torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if "python" in state:
            random.setstate(state["python"])
        if "numpy" in state:
            kind, keys, position, has_gauss, gauss = state["numpy"]
            np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(f"rng: the state of a random generator does not fit: {error}") from error


# Parts that wrappers add to names; stock's state dicts leave them out.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class OptimizerNames:
    """Optimizers of a model whose parameters have names."""

    optimizers: tuple[Optimizer, ...]
    name_of: Mapping[int, str]

    @classmethod
    def of(cls, model: nn.Module, optimizers: Iterable[Optimizer]) -> OptimizerNames:
        """Raises ValueError if the model lacks a parameter of an optimizer, or two optimizers hold the same one."""
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        names: dict[int, str] = {}
        for name, parameter in inner.named_parameters():
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            names[id(parameter)] = name
        found = cls(tuple(optimizers), names)
        holder: dict[int, int] = {}
        for number, optimizer in enumerate(found.optimizers):
            for parameter in (*(one for group in optimizer.param_groups for one in group["params"]), *optimizer.state):
                if id(parameter) not in names:
                    what = (
                        f"a parameter of shape {tuple(parameter.shape)}" if hasattr(parameter, "shape") else parameter
                    )
                    raise ValueError(
                        f"optimizer {number} holds {what}, which is not a parameter of the model: build it from "
                        "model.parameters(), after fully_shard"
                    )
                if holder.setdefault(id(parameter), number) != number:
                    raise ValueError(
                        f"{names[id(parameter)]}: both optimizer {holder[id(parameter)]} and optimizer {number} hold "
                        "it, and a checkpoint has one state for each parameter; give it to one of them"
                    )
        return found

    def state_dict(self) -> dict[str, Any]:
        """State by name and parameter groups with names of parameters; its tensors are the live ones.

        Raises ValueError for plain state that has the shape of a parameter's shard: it would be saved for one rank.
        """
        state: dict[str, Any] = {}
        groups = []
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                state[self.name_of[id(parameter)]] = dict(values)
                _refuse_plain_shards(self.name_of[id(parameter)], parameter, values)
            for group in optimizer.param_groups:
                names = [self.name_of[id(parameter)] for parameter in group["params"]]
                groups.append({**group, "params": names})
        return {"state": state, "param_groups": groups}

    def target(self, entry: TensorEntry) -> torch.Tensor | None:
        """The tensor to read an entry of a parameter's state into: the live one, else a new one with the parameter's
        layout, or None for a nested entry, which may have any shape and is read whole. Raises CheckpointError if a new
        tensor would need another shape than the parameter's.
        """
        name, key, *deeper = map(str, entry.path[2:])
        optimizer, parameter = self._by_name[name]
        dtype, shape, owned = entry.dtype, entry.shape, _is_owned(parameter)
        if deeper:
            fits = bool(shape) and tuple(parameter.shape) == shape and not owned
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False) if fits else None
        live = optimizer.state.get(parameter, {}).get(key)
        if isinstance(live, torch.Tensor) and tuple(live.shape) == shape and live.dtype == dtype:
            return live
        if not shape and (key in NUMBERS or parameter.ndim):
            return None
        if tuple(parameter.shape) == shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)  # has no memory before it is read
        if owned:
            return None  # a plain tensor on its owner
        by_block = target_by_block(key, dtype, shape, parameter)
        if by_block is not None:
            return by_block
        raise CheckpointError(
            f"optimizer.state.{name}.{key} has shape {shape}, its parameter {tuple(parameter.shape)}: take a step, "
            "so that the optimizer has state to read into, then restore"
        )

    def place(self, targets: Mapping[LeafPath, torch.Tensor]) -> None:
        """Moves new tensors to where the optimizers keep their state: into files, if it lies there."""
        for optimizer in self.optimizers:
            if (steps := plain_steps_of(optimizer)) is not None:
                state: defaultdict[torch.Tensor, list[DTensor]] = defaultdict(list)
                for path, tensor in targets.items():
                    holder, parameter = self._by_name[str(path[2])]
                    if holder is optimizer and isinstance(tensor, DTensor):
                        state[parameter].append(tensor)
                steps.place_state(state)

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters that the optimizers hold."""
        return self._by_name.keys()

    @functools.cached_property
    def _by_name(self) -> dict[str, tuple[Optimizer, torch.Tensor]]:
        return {
            self.name_of[id(parameter)]: (optimizer, parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def load(self, stored: Mapping[str, Any]) -> None:
        """Loads into each optimizer its part of a stored `state_dict`. Raises CheckpointError for parameters that are
        in no stored group, or in several.
        """
        state, groups = stored.get("state", {}), stored.get("param_groups", [])
        loads, number = [], 0
        for optimizer in self.optimizers:
            names: list[str] = []
            options = []
            for group in optimizer.param_groups:
                own = [self.name_of[id(parameter)] for parameter in group["params"]]
                if own:
                    found = _group_of(own, groups, number)
                else:  # options of the stored group in this place, or this group's own if that one has parameters
                    stored_group = groups[number] if number < len(groups) else group
                    found = dict(group if stored_group.get("params") else stored_group)
                options.append({**found, "params": list(range(len(names), len(names) + len(own)))})
                names += own
                number += 1
            loads.append((optimizer, names, options))
        for optimizer, names, options in loads:
            _load(optimizer, state, names, options)


def _refuse_plain_shards(name: str, parameter: torch.Tensor, values: Mapping[str, Any]) -> None:
    if not isinstance(parameter, DTensor) or any(map(is_ours, parameter.placements)):
        return
    local, whole = tuple(local_of(parameter).shape), tuple(parameter.shape)
    for key, value in values.items():
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if plain and value.numel() > 1 and tuple(value.shape) == local != whole:
            raise ValueError(
                f"optimizer.state.{name}.{key}: a plain tensor of shape {local}, as this rank's shard; "
                f"expected a DTensor of shape {whole}, of which every rank's part is saved; make it with "
                "torch.zeros_like(parameter)"
            )


def _is_owned(parameter: torch.Tensor) -> bool:
    """Whether one rank steps on it as a plain tensor; then its nested state is plain."""
    return isinstance(parameter, DTensor) and any(isinstance(one, Owned) for one in parameter.placements)


def _load(optimizer: Optimizer, state: Mapping[str, Any], names: list[str], options: list[dict[str, Any]]) -> None:
    stored = {number: state[name] for number, name in enumerate(names) if name in state}
    optimizer.load_state_dict({"state": stored, "param_groups": options})
    for number, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"]):
        if number in stored:
            optimizer.state[parameter] = _as_stored(optimizer.state[parameter], stored[number])


def _as_stored(loaded: Any, stored: Any) -> Any:
    """An optimizer's loaded state in the stored dtypes; it casts everything but `step` to the parameter's."""
    if isinstance(stored, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == stored.dtype else stored.to(device=loaded.device)
    if isinstance(stored, dict) and isinstance(loaded, dict):
        return {key: one if key == "step" else _as_stored(one, stored.get(key)) for key, one in loaded.items()}
    if isinstance(stored, list) and isinstance(loaded, list) and len(stored) == len(loaded):
        return [_as_stored(*pair) for pair in zip(loaded, stored, strict=True)]
    return loaded


def _group_of(names: list[str], groups: list[Any], number: int) -> dict[str, Any]:
    """The stored group that contains all of these parameters."""
    for group in groups:
        if set(names) <= set(group.get("params", ())):
            return dict(group)
    raise CheckpointError(
        f"no parameter group of the checkpoint has {', '.join(names[:3])}{' ...' if len(names) > 3 else ''} together "
        f"(group {number} of the optimizers); build the optimizer with the parameter groups that it was saved with"
    )


@dataclass(frozen=True)
class TrainingState:
    """A training run, for `CheckpointManager.save` and `restore`. The same on all ranks, except `per_rank`.

    Attributes:
        model: sharded or not; its state dict goes under "model".
        optimizer: one or several with separate parameters; stored under "optimizer", by parameter name.
        scheduler: the learning rate scheduler, or any object with `state_dict` and `load_state_dict`; under
            "scheduler".
        user: names of other objects with these two methods, and the objects: `{"counter": counter}`. Each is stored
            under its name. Their tensors may be DTensors. Values that are not tensors are stored once, from rank 0.
        per_rank: like `user`, for state that differs by rank, such as a data loader's position; under "<key>.<rank>".
            It needs as many ranks as saved it, unless the object's `load_state_dicts(states)` takes all states, by
            rank.
        rng: whether to include the random generators of each rank (torch's, Python's, numpy's).

    Raises:
        TypeError: for an optimizer, a scheduler or an object of `user` or `per_rank` that lacks the methods it needs.
        ValueError: for a key that is one of the names above or is not a plain name.
    """

    model: nn.Module
    optimizer: Optimizer | Iterable[Optimizer] = ()
    scheduler: Stateful | None = None
    user: Mapping[str, Stateful] = field(default_factory=dict)
    per_rank: Mapping[str, Stateful] = field(default_factory=dict)
    rng: bool = True

    def __post_init__(self) -> None:
        if not _acts_as_optimizer(self.optimizer):
            object.__setattr__(self, "optimizer", _several_optimizers(self.optimizer))  # an iterator is read only once
        if self.scheduler is not None:
            _check_stateful("scheduler", self.scheduler)
        taken = [MODEL, OPTIMIZER, SCHEDULER, RNG]
        for what, mapping in (("user", self.user), ("per_rank", self.per_rank)):
            if not isinstance(mapping, Mapping):
                raise TypeError(
                    f"{what} is a {type(mapping).__name__}, expected a mapping of names to objects with state_dict and "
                    f'load_state_dict; pass for example {what}={{"counter": counter}}'
                )
            for key, one in mapping.items():
                if not isinstance(key, str) or key in taken or not key or "." in key:
                    raise ValueError(
                        f"{what} has the key {key!r}, expected a name without dots that is not one of "
                        f"{', '.join(taken)}; rename it"
                    )
                _check_stateful(f"{what}[{key!r}]", one)
                taken.append(key)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All optimizers."""
        return self.optimizer if isinstance(self.optimizer, tuple) else (self.optimizer,)

    def stateful(self) -> Iterator[tuple[str, Stateful]]:
        """Scheduler and user state, by key."""
        if self.scheduler is not None:
            yield SCHEDULER, self.scheduler
        yield from self.user.items()

    def capture(self, rank: int) -> Captured:
        """The leaves of the current state; tensors are the live ones. Not collective.

        Raises:
            TypeError, ValueError: for state that cannot be stored; the message has its name.
        """
        shared = flatten(get_model_state_dict(self.model), (MODEL,))
        if self.optimizers:
            names = OptimizerNames.of(self.model, self.optimizers)
            _add(shared, flatten(names.state_dict(), (OPTIMIZER,)))
        for key, one in self.stateful():
            _add(shared, flatten(one.state_dict(), (key,)))
        own = Leaves()
        for key, one in self.per_rank.items():
            _add(own, flatten(one.state_dict(), (key, str(rank))))
        if self.rng:
            _add(own, flatten(get_rng_state(), (RNG, str(rank))))
        parameters = tuple((MODEL, name) for name in OptimizerNames.of(self.model, ()).name_of.values())
        return Captured(shared, own, parameters)


def _several_optimizers(given: Any) -> tuple[Optimizer, ...]:
    if not isinstance(given, Iterable):
        raise TypeError(
            f"optimizer is a {type(given).__name__}, expected an Optimizer or several; pass the optimizer that steps "
            "on the model"
        )
    found = tuple(given)
    for number, one in enumerate(found):
        if not _acts_as_optimizer(one):
            raise TypeError(
                f"optimizer {number} is a {type(one).__name__}, expected an Optimizer; pass optimizers, not their "
                "parameters"
            )
    return found


def _acts_as_optimizer(one: Any) -> bool:
    """Whether it has what a checkpoint needs of an optimizer; a wrapper of one need not be an Optimizer itself."""
    needed = ("param_groups", "state", "load_state_dict")
    return isinstance(one, Optimizer) or all(hasattr(one, name) for name in needed)


def _check_stateful(what: str, one: object) -> None:
    missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(one, name, None))]
    if missing:
        raise TypeError(
            f"{what} is a {type(one).__name__} without {' and '.join(missing)}; pass an object with both, such as one "
            "that returns its value from state_dict() in a dict and takes it back in load_state_dict()"
        )


def _add(to: Leaves, more: Leaves) -> None:
    to.values.update(more.values)
    to.empties.extend(more.empties)


def restore_state(directory: Location, index: Index, state: TrainingState, rank: int, world_size: int) -> None:
    """Fills this rank's part of a training state. Not collective.

    Reads and verifies the values first, then loads every part of the run. Raises CheckpointError if checkpoint and
    state do not match, DamagedCheckpointError for a damaged file.
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

    # load_state_dict copies values filled in place onto themselves, so modules' hooks see an ordinary load.
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
        self._filled: set[int] = set()  # addresses of live tensors that are read in place

    def _add(self, path: LeafPath, target: Callable[[TensorEntry], torch.Tensor | None]) -> None:
        """Reads the value at `path` into its target tensor, or else into a new one."""
        entry = self._index.tensors.get(name_of(path))
        if entry is None:
            self._objects.append(name_of(path))
            return
        found = target(entry)
        if found is None:
            found = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        elif self._is_filled(found):  # such as an average that begins as the parameters: two values, one memory
            found = torch.empty_like(found, requires_grad=False)
        self._tensors[path] = found

    def _is_filled(self, live: torch.Tensor) -> bool:
        """Whether another value is read into this memory; from now on one is."""
        plain = local_of(live) if isinstance(live, DTensor) else live
        address = plain.data_ptr() if type(plain) in (torch.Tensor, nn.Parameter) else 0  # others may have none
        seen = address in self._filled
        self._filled |= {address} - {0}
        return seen

    def model(self, state: Mapping[str, Any]) -> None:
        """Reads the model's tensors in place; other state of its modules is read as it was stored."""
        known = {*self._index.paths.values(), *self._index.empties}
        known |= {path[:2] for path in _entries(self._index, (MODEL,))}
        names = self._index.paths.keys()
        paths = ((MODEL, name) for name in state)
        missing = sorted(name_of(path) for path in paths if path not in known and name_of(path) not in names)
        if missing:
            listed = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
            raise CheckpointError(
                f"the checkpoint does not fit the model: it lacks {listed}; build the model that was saved"
            )
        for name, live in state.items():
            path = (MODEL, name)
            if name.endswith("_extra_state") or not isinstance(live, torch.Tensor):  # may be of any type and shape
                self.like(path, flatten({name: live}, (MODEL,)).values)
            elif name_of(path) in self._index.tensors:
                self._is_filled(live)
                self._tensors[path] = live  # a mismatch is refused when it is read
            else:
                raise CheckpointError(
                    f"{name_of(path)} is a tensor in the model, but not in the checkpoint; "
                    "build the model that was saved"
                )

    def like(self, prefix: LeafPath, leaves: Mapping[LeafPath, Any]) -> None:
        """Reads everything under `prefix`, in place where `leaves` has a tensor of the same shape and dtype."""
        stored = _entries(self._index, prefix)
        if not stored and leaves and prefix not in self._index.empties:
            raise CheckpointError(
                f"the checkpoint has nothing under '{name_of(prefix)}', which the state has; leave it out of the state"
            )

        def target(entry: TensorEntry) -> torch.Tensor | None:
            live = leaves.get(entry.path)
            alike = isinstance(live, torch.Tensor) and (tuple(live.shape), live.dtype) == (entry.shape, entry.dtype)
            return live if alike or isinstance(live, DTensor) else None

        for path in stored:
            self._add(path, target)

    def optimizer(self, names: OptimizerNames) -> None:
        """Reads everything under "optimizer", into tensors with the layout of their parameters."""
        stored = _entries(self._index, (OPTIMIZER,))
        if not stored:
            raise CheckpointError(
                "the checkpoint has no optimizer state; restore TrainingState(model) alone to take its weights"
            )
        for path in stored:
            if path[1] != "state" or len(path) < 4:
                self._add(path, lambda _: None)
            elif str(path[2]) in names.names:  # else it belongs to a parameter on other ranks
                self._add(path, names.target)
        names.place({path: one for path, one in self._tensors.items() if path[:2] == (OPTIMIZER, "state")})

    def read(self, directory: Location) -> dict[LeafPath, Any]:
        """Reads everything: the filled tensors and the objects by path, in the order in which they were saved."""
        objects = read_objects(directory, self._index, self._objects)
        read_tensors(directory, self._index, self._tensors.items())
        return self._index.in_order({**self._tensors, **objects})


def unexpected_names(index: Index, state: TrainingState) -> set[str]:
    """Names in the checkpoint of a model that this rank's model lacks."""
    known = {name_of((MODEL, name)) for name in get_model_state_dict(state.model)}
    return {
        name_of(path)
        for path in _entries(index, (MODEL,))
        if name_of(path) not in known and name_of(path[:2]) not in known
    }


def _counters_as(live: Any, tree: Any) -> Any:
    """The values read, with a Counter wherever the live state has one, such as a scheduler's milestones."""
    if isinstance(live, Mapping) and isinstance(tree, dict):
        below = {key: _counters_as(live.get(key), one) for key, one in tree.items()}
        return Counter(below) if type(live) is Counter else below
    if isinstance(live, list) and isinstance(tree, list):
        return [_counters_as(*pair) for pair in itertools.zip_longest(live[: len(tree)], tree)]
    return tree


def _entries(index: Index, prefix: LeafPath) -> list[LeafPath]:
    size = len(prefix)
    return [path for path in index.paths.values() if path[:size] == prefix]


def _tree(read: Mapping[LeafPath, Any], index: Index, prefix: LeafPath) -> Any:
    size = len(prefix)
    empties = [path[size:] for path in index.empties if path[:size] == prefix]
    return unflatten({path[size:]: value for path, value in read.items() if path[:size] == prefix}, empties)


def _ranks_to_read(index: Index, state: TrainingState, rank: int, world_size: int) -> dict[str, list[int]]:
    """The ranks whose per-rank state this rank needs, by key. Raises CheckpointError if per-rank state of another
    number of ranks cannot be distributed.
    """
    found: dict[str, list[int]] = {}
    for key, one in state.per_rank.items():
        stored = sorted(_ranks_of(index, key))
        if not stored:
            raise CheckpointError(
                f"the checkpoint has nothing under '{key}', which the state has per rank; leave it out of the state"
            )
        if index.world_size == world_size:
            found[key] = [rank]
        elif hasattr(one, "load_state_dicts"):
            found[key] = stored
        else:
            raise CheckpointError(
                f"'{key}' was saved separately by {index.world_size} ranks, and there are {world_size} now: give "
                f"{type(one).__name__} a method load_state_dicts(states) that distributes the states of all ranks, "
                f"or restore with {index.world_size} ranks"
            )
        if missing := set(found[key]) - set(stored):
            raise DamagedCheckpointError(f"'{key}' of rank {min(missing)} is missing in the checkpoint")
    if state.rng and rank in _ranks_of(index, RNG):
        found[RNG] = [rank]
    return found


def _ranks_of(index: Index, key: str) -> set[int]:
    paths = [path for path in (*index.paths.values(), *index.empties) if path[0] == key and len(path) > 1]
    return {int(path[1]) for path in paths if isinstance(path[1], str) and path[1].isdecimal()}
