"""The work that waits for the first forward, when it is known which module is the root."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.core import events
from shardkit.core.managed import STATE
from shardkit.core.order_check import OrderCheck, agree, order_check_wanted
from shardkit.core.param_group import FSDPParamGroup

if TYPE_CHECKING:
    from shardkit.core.state import FSDPState

__all__ = ["initialise_root"]


def initialise_root(root: FSDPState) -> None:
    """Makes `root` the root of all states below its module (collective: the ranks compare their parameters).

    Raises:
        RuntimeError: if a state below has been initialised as a root itself, if the state has several modules, or if
            the ranks disagree about the parameters.
    """
    if len(root.modules) > 1:
        names = [type(module).__name__ for module in _alive(root)]
        raise RuntimeError(
            f"the group of modules {names} ran forward before any module that contains them all; fully_shard the model "
            "that contains them too, and run forward through it first"
        )
    (module,) = _alive(root)
    states = _states_below(root, module)
    _set_names(states, module)
    for state in states:
        _check_prefetching(state, root, type(module).__name__)
    with events.Waiting(root.fqn, "set-up"):
        _check_agreement(list(dict.fromkeys(group for state in states for group in state.groups)), root.fqn)
    root.iteration.set_states(states)
    check = OrderCheck() if order_check_wanted() else None
    for state in states:
        state.is_root = state is root
        state.iteration = root.iteration
        for group in state.groups:
            group.context = root.iteration.context
            group.order_check = check
            group.bounded = group.bounded and state is not root
    if root.auto_reshard:
        for group in root.groups:
            group.reshard_after_forward = False
    if events.hub.active:
        events.emit(events.RootReady(module))


def _check_prefetching(state: FSDPState, root: FSDPState, name: str) -> None:
    for setting in ("prefetch_depth", "prefetch_budget"):
        seen, expected = getattr(state.iteration, setting), getattr(root.iteration, setting)
        if seen not in (None, expected):
            raise RuntimeError(
                f"set_{setting}({seen}) was called on '{state.fqn}', below the root {name}; it is a setting of the "
                "root, call it there"
            )


def _alive(state: FSDPState) -> list[nn.Module]:
    return [module for reference in state.modules if (module := reference()) is not None]


def _states_below(root: FSDPState, module: nn.Module) -> list[FSDPState]:
    states: dict[FSDPState, None] = {}
    for name, below in module.named_modules():
        state: FSDPState | None = below.__dict__.get(STATE)
        if state is None or state in states:
            continue
        if state.is_root is not None:
            raise RuntimeError(
                f"'{name}' ran forward, or was unsharded, as a root of its own before the {type(module).__name__} that "
                "contains it; the first forward must go through the outermost sharded module"
            )
        states[state] = None
    return list(states)


def _set_names(states: list[FSDPState], root: nn.Module) -> None:
    names = {id(module): name for name, module in reversed(list(root.named_modules()))}
    for state in states:
        own = [names.get(id(module), type(module).__name__) or type(root).__name__ for module in _alive(state)]
        state.fqn = ", ".join(own)
        for group in state.groups:
            for param in group.params:
                for slot in param.slots:
                    holder = slot.module()
                    if holder is not None and id(holder) in names:
                        path = names[id(holder)]
                        param.fqn = f"{path}.{slot.name}" if path else slot.name
                        break
            group.label = state.fqn if group is state.groups[0] else f"{state.fqn}: {group.params[0].fqn}"


def _check_agreement(groups: list[FSDPParamGroup], fqn: str) -> None:
    by_process_group: dict[dist.ProcessGroup, list[list[Any]]] = defaultdict(list)
    device = torch.device("cpu")
    for group in groups:
        device = group.device
        for process_group in group.mesh.groups:
            by_process_group[process_group] += [
                [
                    param.fqn,
                    list(param.shape),
                    str(param.orig_dtype),
                    param.layout.dim,
                    param.sharded_param.requires_grad,
                ]
                for param in group.params
            ]
    for process_group, described in by_process_group.items():
        try:
            if process_group.size() == 1 or agree(json.dumps(described).encode(), process_group, device):
                continue
        except RuntimeError as error:  # the backend's, when a rank does not come
            raise RuntimeError(f"{fqn}: set-up failed (comparing models with the other ranks): {error}") from error
        everyone: list[Any] = [None] * process_group.size()
        dist.all_gather_object(everyone, described, group=process_group)
        raise RuntimeError(_difference(everyone, dist.get_process_group_ranks(process_group)))


def _difference(everyone: list[list[list[Any]]], ranks: list[int]) -> str:
    for rank, described in zip(ranks[1:], everyone[1:], strict=True):
        for index in range(max(len(described), len(everyone[0]))):
            first = everyone[0][index] if index < len(everyone[0]) else None
            other = described[index] if index < len(described) else None
            if first != other:
                return (
                    f"the ranks disagree about the model's parameters, number {index} in order of use: rank {ranks[0]} "
                    f"has {_describe(first)}, rank {rank} has {_describe(other)}. Every rank must build and shard the "
                    "same model"
                )
    raise AssertionError("the digests differ but the descriptions do not")


def _describe(entry: list[Any] | None) -> str:
    if entry is None:
        return "no further parameter"
    fqn, shape, dtype, dim, requires_grad = entry
    return f"'{fqn}' of shape {tuple(shape)}, {dtype}, sharded on dim {dim}, requires_grad={requires_grad}"
