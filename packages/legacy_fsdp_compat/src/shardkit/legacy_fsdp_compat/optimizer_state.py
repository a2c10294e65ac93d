"""Optimizer state by parameter name, whole or sharded: from an optimizer's state dict, and back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardkit.core.torch_compat import local_of, new_dtensor
from shardkit.legacy_fsdp_compat.optimizer_names import NamedParameter, ParameterNames, key_of_each
from shardkit.legacy_fsdp_compat.sharded_values import from_sharded, to_sharded
from shardkit.legacy_fsdp_compat.torch_compat import ShardedTensor
from shardkit.legacy_fsdp_compat.units import UnitParameter, clean_name

__all__ = ["Shape", "named_state", "state_to_load"]

State = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The form of a named optimizer state dict.

    Attributes:
        full: whether tensors are whole; else each rank has its rows.
        rank0_only: with `full`, whether only the first rank gets values.
        offload: whether tensors are on the CPU.
        as_dtensor: whether rows are DTensors instead of ShardedTensors.
    """

    full: bool
    rank0_only: bool = False
    offload: bool = True
    as_dtensor: bool = False


@torch.no_grad()
def named_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state_dict: State,
    optim_input: Iterable[Any] | None,
    shape: Shape,
    group: dist.ProcessGroup | None,
) -> State:
    """An optimizer's state dict with names for numbers and whole or sharded values (collective over `group`).

    Every parameter group keeps its hyper-parameters, even if it is empty. Parameters without state are listed in their
    group and have no entry in "state".
    """
    names = ParameterNames(model)
    is_named = any(isinstance(key, str) and clean_name(key) in names.by_fqn for key in state_dict["state"])
    keys = key_of_each(names, optimizer, optim_input, named_keys=state_dict["state"] if is_named else None)
    states = {fqn: dict(state_dict["state"][key]) for fqn, key in keys.items() if key in state_dict["state"]}
    _check_ranks_agree(names, states, group)
    _fill_flat_units(names, keys, states)
    # Every value is a separate collective, and ranks may have built their groups in different orders.
    states = {one.fqn: states[one.fqn] for one in names.distinct if one.fqn in states}
    keep = not shape.rank0_only or dist.get_rank(group) == 0
    result: State = {}
    for fqn, state in states.items():
        named = names.by_fqn[fqn]
        values = {name: _value(named, state[name], shape) for name in sorted(state)}
        if keep:
            result[fqn] = {name: values[name] for name in state}
    if not keep:
        return {}
    for key, value in state_dict["state"].items():
        if key not in keys.values():
            warnings.warn(
                f"the optimizer state has an entry {key!r} of no parameter; it is copied as it is", stacklevel=4
            )
            result[str(key) if isinstance(key, int) else key] = value
    named_dict: State = {"state": result}
    if "param_groups" in state_dict:
        fqn_of = {key: fqn for fqn, key in keys.items()}
        named_dict["param_groups"] = [
            {**_hyper_parameters(one), "params": [fqn_of[key] for key in one["params"]]}
            for one in state_dict["param_groups"]
        ]
    return named_dict


def _hyper_parameters(group: State) -> State:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


def _check_ranks_agree(names: ParameterNames, states: dict[str, State], group: dist.ProcessGroup | None) -> None:
    """Checks that every rank has the same sharded state, which is gathered value by value (collective)."""
    mine = {fqn: sorted(state) for fqn, state in states.items() if names.by_fqn[fqn].unit is not None}
    everyone: list[dict[str, list[str]]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for fqn in everyone[0] | theirs:
            if everyone[0].get(fqn) != theirs.get(fqn):
                raise RuntimeError(
                    f"the optimizer state of '{fqn}' is {everyone[0].get(fqn)} on rank 0 and {theirs.get(fqn)} on rank "
                    f"{rank}; every rank must step its optimizer on the same parameters"
                )


def _fill_flat_units(names: ParameterNames, keys: Mapping[str, object], states: dict[str, State]) -> None:
    """With use_orig_params=False a unit has state as a whole: parameters without state get zeros, like elements of a
    flat parameter that never had a gradient.
    """
    by_unit: dict[int, list[NamedParameter]] = {}
    for named in names.distinct:
        if named.unit is not None and not named.unit.use_orig_params and named.fqn in keys:
            by_unit.setdefault(id(named.unit), []).append(named)
    for members in by_unit.values():
        example = next((one for one in members if one.fqn in states), None)
        if example is None or not _is_elementwise(states[example.fqn], example):
            continue
        for one in members:
            if one.fqn not in states:
                states[one.fqn] = {name: _zeros_like(value, one) for name, value in states[example.fqn].items()}


def _is_elementwise(state: State, named: NamedParameter) -> bool:
    """Whether the state has a value for each element; factored state, such as Adafactor's, does not."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
    return all(tensor.shape == named.parameter.shape for tensor in tensors)


def _zeros_like(value: Any, named: NamedParameter) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return torch.zeros_like(named.parameter, dtype=value.dtype, requires_grad=False)
    return copy.deepcopy(value)


def _value(named: NamedParameter, value: Any, shape: Shape) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    unit, managed = named.unit, named.managed
    if unit is None or managed is None or not isinstance(value, DTensor) or not _is_cut_like(managed, value):
        whole = value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
        return whole.cpu() if shape.offload else whole
    if not shape.full:
        return to_sharded(unit, managed, value, as_dtensor=shape.as_dtensor, offload=shape.offload)
    full = unit.full(managed, value, everywhere=not shape.rank0_only)
    return full.cpu() if full is not None and shape.offload else full


def _is_cut_like(managed: UnitParameter, value: DTensor) -> bool:
    own = cast(DTensor, managed.sharded)
    return value.shape == own.shape and tuple(value.placements) == tuple(own.placements)


@torch.no_grad()
def state_to_load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state_dict: State,
    optim_input: Iterable[Any] | None,
    *,
    full: bool,
    from_rank0: bool,
    by_name: bool,
    group: dist.ProcessGroup | None,
) -> State:
    """The inverse of `named_state`: the state dict for `optimizer.load_state_dict` on this rank (collective).

    With `full` the values are whole tensors, else ShardedTensors or DTensors. With `from_rank0` only the first rank of
    `group` has `state_dict`, and tensors are broadcast one at a time. With `by_name` the optimizer's own state dict has
    names as keys.

    Raises:
        ValueError: if values do not fit their parameter, or a group lists an unknown name.
    """
    names = ParameterNames(model)
    keys = key_of_each(names, optimizer, optim_input, named_keys=_listed(optimizer) if by_name else None)
    source = _Broadcast(state_dict, group) if from_rank0 else None
    outline = state_dict if source is None else source.outline
    if "state" not in outline:
        raise ValueError(
            f"an optimizer state dict needs the key 'state', got {sorted(outline)}; pass what optim_state_dict returned"
        )
    result: dict[Any, Any] = {}
    for fqn in _in_order_of_model(names, outline["state"]):
        named = names.by_fqn.get(fqn)
        values = outline["state"][fqn] if source is None else source.tensors(fqn)
        if named is None:
            result[fqn] = copy.copy(values)
            continue
        loaded = {name: _loaded(named, name, value, full) for name, value in values.items()}
        if named.fqn in keys and loaded:
            result[keys[named.fqn]] = loaded
    loadable: State = {"state": result}
    if "param_groups" in outline:
        loadable["param_groups"] = [_group_to_load(names, keys, one) for one in outline["param_groups"]]
        if optimizer is not None:
            fqn_of = {key: fqn for fqn, key in keys.items()}
            _check_same_groups(optimizer, loadable["param_groups"], fqn_of, names)
    return loadable


def _listed(optimizer: torch.optim.Optimizer | None) -> list[object]:
    """The keys that an optimizer gives its parameters in its own state dict."""
    groups = [] if optimizer is None else optimizer.state_dict()["param_groups"]
    return [key for group in groups for key in group["params"]]


def _in_order_of_model(names: ParameterNames, state: State) -> list[str]:
    """The names in a state dict, in an order that all ranks share, because values cut differently are gathered."""
    place = {named.fqn: index for index, named in enumerate(names.distinct)}
    return sorted(state, key=lambda fqn: place[names.by_fqn[fqn].fqn] if fqn in names.by_fqn else len(place))


def _check_same_groups(
    optimizer: torch.optim.Optimizer, groups: list[State], fqn_of: Mapping[int | str, str], names: ParameterNames
) -> None:
    """Checks that groups agree: `Optimizer.load_state_dict` goes by position, and would mix up parameters.

    Those that no FSDP module manages may be lacking: their user loads them, as in stock.
    """
    first = 0
    for index, (own, loaded) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        size = len(own["params"])
        expected = {fqn for key, fqn in list(fqn_of.items())[first : first + size]}
        seen = {fqn_of[key] for key in loaded["params"]}
        first += size
        expected = {fqn for fqn in expected if fqn in seen or names.by_fqn[fqn].unit is not None}
        if seen != expected:
            raise ValueError(
                f"parameter group {index} of the optimizer state dict has {sorted(seen - expected)}, which the "
                f"optimizer has in another group, and lacks {sorted(expected - seen)}; build the optimizer with the "
                "groups of the checkpoint"
            )


def _group_to_load(names: ParameterNames, keys: Mapping[str, int | str], group: State) -> State:
    numbers: set[Any] = set()
    for fqn in group["params"]:
        named = names.by_fqn.get(fqn)
        if named is None or named.fqn not in keys:
            where = "model" if named is None else "optimizer"
            raise ValueError(
                f"a parameter group of the optimizer state dict lists '{fqn}', which is not in the {where}; "
                "load the state that belongs to this model"
            )
        numbers.add(keys[named.fqn])
    return {**_hyper_parameters(group), "params": sorted(numbers)}


def _loaded(named: NamedParameter, name: str, value: Any, full: bool) -> Any:
    unit, managed = named.unit, named.managed
    if not isinstance(value, torch.Tensor | ShardedTensor) or unit is None or managed is None:
        return copy.deepcopy(value)
    what = f"{named.fqn}: {name}"
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return _scalar(managed, name, value)
    if isinstance(value, torch.Tensor) and _is_factor(value.shape, managed.shape):
        return _factor(managed, value)
    if not full or isinstance(value, DTensor | ShardedTensor):
        rows = from_sharded(unit, managed, value, what)
    elif tuple(value.shape) != tuple(managed.shape):
        raise ValueError(
            f"'{what}' has shape {tuple(value.shape)}, the parameter has {tuple(managed.shape)}; "
            "load the state of this model's optimizer"
        )
    else:
        rows = managed.own_rows(value)
    return _like(managed, rows)


def _scalar(managed: UnitParameter, name: str, value: torch.Tensor) -> torch.Tensor:
    """State of a 0-dim parameter is a DTensor like it; a step counter is always a plain tensor."""
    plain = local_of(value) if isinstance(value, DTensor) else value
    return plain.detach().clone() if managed.shape or name == "step" else _like(managed, plain)


def _is_factor(shape: torch.Size, of: torch.Size) -> bool:
    """Whether a shape is Adafactor's factor for rows or columns: the parameter's shape with one dim 1."""
    if len(shape) != len(of) or len(of) < 2:
        return False
    other = [dim for dim, (mine, theirs) in enumerate(zip(shape, of, strict=True)) if mine != theirs]
    return len(other) == 1 and other[0] >= len(of) - 2 and shape[other[0]] == 1


def _factor(managed: UnitParameter, value: torch.Tensor) -> DTensor:
    """A factor as a DTensor: every rank holds it whole, as DTensor operators make it."""
    own = cast(DTensor, managed.sharded)
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    copied = whole.detach().to(local_of(own).device).clone(memory_format=torch.contiguous_format)
    return new_dtensor(copied, own.device_mesh, [Replicate()] * own.device_mesh.ndim, copied.shape)


def _like(managed: UnitParameter, rows: torch.Tensor) -> torch.Tensor:
    home = local_of(managed.sharded).device
    return managed.like(rows.to(home).clone(memory_format=torch.contiguous_format))


@dataclass(frozen=True)
class _Stub:
    """Stands for a tensor that has not arrived yet."""

    shape: torch.Size
    dtype: torch.dtype


class _Broadcast:
    """An optimizer state dict of rank 0: its outline arrives at once, its tensors on request."""

    def __init__(self, state_dict: State, group: dist.ProcessGroup | None) -> None:
        self._own = state_dict
        self._group = group
        self._first = dist.get_rank(group) == 0
        box = [self._outline(state_dict) if self._first else None]
        dist.broadcast_object_list(box, group=group, group_src=0)
        self.outline = cast(State, box[0])

    def _outline(self, state_dict: State) -> State:
        outline = dict(state_dict)
        if "state" not in outline:
            return outline
        outline["state"] = {
            fqn: {
                name: _Stub(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }
            if isinstance(state, Mapping)
            else state
            for fqn, state in state_dict["state"].items()
        }
        return outline

    def tensors(self, fqn: str) -> State:
        """The state of one parameter; every rank asks in the order of the outline (collective)."""
        state = self.outline["state"][fqn]
        return {name: self._tensor(fqn, name, value) for name, value in state.items()}

    def _tensor(self, fqn: str, name: str, value: Any) -> Any:
        if not isinstance(value, _Stub):
            return value
        wire = torch.device("cpu")
        backends = dist.get_backend_config(self._group)
        if "cpu" not in backends:
            wire = torch.device(torch.accelerator.current_accelerator() or "cpu")
        if self._first:
            tensor = self._own["state"][fqn][name].detach().to(wire).contiguous()
        else:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=wire)
        if tensor.numel():
            dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor
