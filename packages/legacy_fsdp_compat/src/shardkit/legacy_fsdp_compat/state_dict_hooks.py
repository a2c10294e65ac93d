"""Hooks around `state_dict()` and `load_state_dict()` of an FSDP module: names, and values by type.

Core's state dicts hold DTensors under names with wrapper prefixes. A hook after `state_dict()` of each FSDP module
removes the prefix and converts the unit's own values to the chosen type; a hook before loading does the reverse. Units
do this one after the other, so a rank that does not keep whole parameters holds at most one.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.torch_compat import local_of
from shardkit.legacy_fsdp_compat.api import (
    FullStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from shardkit.legacy_fsdp_compat.flat_layout import FLAT_NAME
from shardkit.legacy_fsdp_compat.local_values import from_flat, local_views, to_flat
from shardkit.legacy_fsdp_compat.sharded_values import from_sharded, to_sharded
from shardkit.legacy_fsdp_compat.torch_compat import ShardedTensor, local_parts
from shardkit.legacy_fsdp_compat.units import WRAPPED, Unit, UnitParameter, clean_name

__all__ = ["register_state_dict_hooks"]


def register_state_dict_hooks(module: nn.Module) -> None:
    """Hooks into the state dicts of one FSDP module."""
    hooks: Any = module  # torch does not annotate these
    hooks.register_state_dict_pre_hook(_before_save)
    hooks.register_state_dict_post_hook(_after_save)
    hooks.register_load_state_dict_pre_hook(_before_load)
    hooks.register_load_state_dict_post_hook(_after_load)


def _settings(module: Any) -> StateDictSettings:
    settings: StateDictSettings = module.effective_settings()
    replicated = module.sharding_strategy is ShardingStrategy.NO_SHARD
    if not replicated or settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        return settings
    warnings.warn(f"with NO_SHARD the state dict is full, not {settings.state_dict_type}", stacklevel=4)
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), settings.optim_state_dict_config)


def _before_save(module: Any, prefix: str, keep_vars: bool) -> None:
    """Refuses unsupported state before anything is gathered. Core's own hook, which resharded, has already run."""
    settings = _settings(module)
    unit: Unit = module._unit
    if not module._summoned:
        for group in module._state.groups:
            group.sweep()
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT and unit.parameters:
        _ = unit.layout  # raises for parameters of several dtypes


@torch.no_grad()
def _after_save(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    _rename(state_dict, f"{prefix}{WRAPPED}.", prefix)
    settings, unit = _settings(module), module._unit
    if module._summoned and settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        raise RuntimeError(
            f"state_dict() of type {settings.state_dict_type} inside summon_full_params, where parameters are whole; "
            "leave it first, or use FULL_STATE_DICT"
        )
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        _save_local(unit, state_dict, prefix, settings)
    else:
        for parameter in unit.parameters:
            _save(unit, parameter, state_dict, prefix, settings, summoned=module._summoned)
        for parameter in unit.tied:
            _save(unit, parameter, state_dict, prefix, settings, summoned=False)
    _save_buffers(module, state_dict, prefix, settings)


def _save(
    unit: Unit,
    parameter: UnitParameter,
    state_dict: dict[str, Any],
    prefix: str,
    settings: StateDictSettings,
    *,
    summoned: bool,
) -> None:
    config = settings.state_dict_config
    names = [prefix + name for name in parameter.aliases if prefix + name in state_dict]
    value = state_dict[names[0]] if names else None
    if not isinstance(value, torch.Tensor):
        return
    result: torch.Tensor | None
    if not isinstance(value, DTensor):  # inside summon_full_params
        result = value.detach().clone()
    elif value.device_mesh != parameter.param.form.mesh:  # likewise, model-parallel
        result = value.full_tensor().detach()
    elif summoned:  # with rank0_only, on another rank
        result = None
    elif isinstance(config, ShardedStateDictConfig):
        as_dtensor = config._use_dtensor
        result = to_sharded(unit, parameter, value, as_dtensor=as_dtensor, offload=config.offload_to_cpu)
    else:
        everywhere = not (isinstance(config, FullStateDictConfig) and config.rank0_only)
        result = unit.full(parameter, value, everywhere=everywhere)
        result = result.cpu() if result is not None and config.offload_to_cpu else result
    for name in names:
        if result is None:
            del state_dict[name]
        else:
            state_dict[name] = result


def _save_local(unit: Unit, state_dict: dict[str, Any], prefix: str, settings: StateDictSettings) -> None:
    for name in _tied_names(unit):  # the unit that wrapped it first has the value
        state_dict.pop(prefix + name, None)
    if not unit.parameters:
        return
    flat = to_flat(unit, offload=settings.state_dict_config.offload_to_cpu)
    parts = local_parts(flat)
    empty = local_of(unit.parameters[0].sharded)
    shard = parts[0][1] if parts else torch.empty(0, dtype=empty.dtype, device=empty.device)
    if unit.use_orig_params:
        state_dict.update({prefix + name: view for name, view in local_views(unit, shard).items()})
        state_dict[prefix + FLAT_NAME] = flat
        return
    for name in (name for parameter in unit.parameters for name in parameter.aliases):
        state_dict.pop(prefix + name, None)
    below = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
    state_dict[prefix + FLAT_NAME] = flat  # first, where the parameters were
    state_dict.update(below)


def _tied_names(unit: Unit) -> list[str]:
    return [name for parameter in unit.tied for name in parameter.aliases]


def _save_buffers(module: Any, state_dict: dict[str, Any], prefix: str, settings: StateDictSettings) -> None:
    config = settings.state_dict_config
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        return
    dropped = isinstance(config, FullStateDictConfig) and config.rank0_only and module.rank != 0
    original = module._precision.original_buffer_dtypes()
    for name in module._buffer_names():
        value = state_dict.get(prefix + name)
        if value is None:
            continue
        if dropped:
            del state_dict[prefix + name]
            continue
        moved = value.cpu() if config.offload_to_cpu else value
        state_dict[prefix + name] = moved.to(original[name]) if name in original else moved


@torch.no_grad()
def _before_load(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_messages: list[str],
) -> None:
    settings, unit = _settings(module), module._unit
    if module._summoned and settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        raise RuntimeError("load_state_dict inside summon_full_params takes FULL_STATE_DICT only; leave it first")
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        _load_local(unit, state_dict, prefix)
    elif not module._summoned:
        for parameter in (*unit.parameters, *unit.tied):
            for name in (prefix + name for name in parameter.aliases):
                if name in state_dict:
                    state_dict[name] = _loaded(unit, parameter, state_dict[name], name, settings, error_messages)
    _rename(state_dict, prefix, f"{prefix}{WRAPPED}.")


def _loaded(
    unit: Unit,
    parameter: UnitParameter,
    value: object,
    name: str,
    settings: StateDictSettings,
    error_messages: list[str],
) -> torch.Tensor:
    """A state dict's value as a DTensor; if it does not fit, the parameter itself and a message."""
    # torch.distributed.checkpoint.state_dict shards whole tensors by itself, whatever the type.
    sharded = settings.state_dict_type is StateDictType.SHARDED_STATE_DICT or isinstance(value, DTensor)
    try:
        rows = from_sharded(unit, parameter, value, name) if sharded else _from_full(parameter, value, name)
    except (TypeError, ValueError) as error:
        error_messages.append(str(error))
        return parameter.sharded
    return parameter.like(rows.to(local_of(parameter.sharded).device).contiguous())


def _from_full(parameter: UnitParameter, value: object, name: str) -> torch.Tensor:
    if isinstance(value, ShardedTensor) or not isinstance(value, torch.Tensor):
        raise TypeError(
            f"'{name}' is a {type(value).__name__}; FULL_STATE_DICT takes plain whole tensors. For sharded ones set "
            "StateDictType.SHARDED_STATE_DICT"
        )
    if tuple(value.shape) != tuple(parameter.shape):
        raise ValueError(
            f"'{name}' has shape {tuple(value.shape)}, the model expects {tuple(parameter.shape)}; "
            "load it into the model that saved it"
        )
    return parameter.own_rows(value)


def _load_local(unit: Unit, state_dict: dict[str, Any], prefix: str) -> None:
    for parameter in unit.tied:  # loaded from itself; the unit that wrapped it first loads its value
        state_dict.update({prefix + name: parameter.sharded for name in parameter.aliases})
    if not unit.parameters:
        return
    rows = from_flat(unit, state_dict.pop(prefix + FLAT_NAME, None), clean_name(prefix + FLAT_NAME))
    for parameter, piece in zip(unit.parameters, rows, strict=True):
        for name in parameter.aliases:
            state_dict[prefix + name] = parameter.like(piece)


def _after_load(module: nn.Module, incompatible_keys: Any) -> None:
    for names in incompatible_keys:
        names[:] = [clean_name(name) for name in names]


def _rename(state_dict: dict[str, Any], old: str, new: str) -> None:
    """Replaces the prefix `old` of names by `new`; their order stays."""
    for name in [name for name in state_dict if name.startswith(old)]:
        state_dict[new + name.removeprefix(old)] = state_dict.pop(name)
