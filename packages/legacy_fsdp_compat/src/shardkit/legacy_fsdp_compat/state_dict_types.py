"""The kind of state dict that FSDP modules return and accept: `state_dict_type` and related methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardkit.legacy_fsdp_compat.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    own,
)

__all__ = ["StateDictApi"]

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


class StateDictApi:
    """The part of FSDP's API that chooses between FULL, SHARDED and LOCAL."""

    _state_dict_settings: StateDictSettings
    _placement: Any

    def init_state_dict_type(self) -> None:
        """Starts with FULL_STATE_DICT."""
        self._state_dict_settings = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Chooses the kind of state dict, and its configuration, for every FSDP module at and below `module`.

        Returns:
            The previous settings of the first FSDP module.

        Raises:
            RuntimeError: for a configuration of another kind.
            ValueError: if there is no FSDP module.
        """
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        modules = _fsdp_modules(module)
        if not modules:
            raise ValueError(f"there is no FSDP module at or below this {type(module).__name__}; wrap it first")
        before = modules[0]._state_dict_settings
        for one in modules:
            if one._state_dict_settings.state_dict_type is not before.state_dict_type:
                raise AssertionError(
                    f"the FSDP modules below this {type(module).__name__} have different state dict types, "
                    f"{before.state_dict_type} and {one._state_dict_settings.state_dict_type}; set the type on the root"
                )
        for one in modules:
            one._state_dict_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of the FSDP modules at and below `module`.

        Raises:
            AssertionError: if they differ.
            ValueError: if there is no FSDP module.
        """
        modules = _fsdp_modules(module)
        if not modules:
            raise ValueError(f"there is no FSDP module at or below this {type(module).__name__}; wrap it first")
        first = modules[0].effective_settings()
        for one in modules[1:]:
            if one.effective_settings() != first:
                raise AssertionError(
                    f"the FSDP modules have different state dict settings: {first} and {one.effective_settings()}; set "
                    "them on the root"
                )
        return first

    def effective_settings(self) -> StateDictSettings:
        """The settings, with `_use_dtensor` set according to the mesh passed to FSDP.

        Raises:
            RuntimeError: for LOCAL_STATE_DICT with a mesh, as in stock.
        """
        settings = self._state_dict_settings
        if self._placement.user_mesh is not None:
            if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
                raise RuntimeError(
                    "LOCAL_STATE_DICT cannot be used with device_mesh, whose sharded state is made of DTensors; use "
                    "SHARDED_STATE_DICT, or pass process_group to FSDP"
                )
            for config in (settings.state_dict_config, settings.optim_state_dict_config):
                if isinstance(config, ShardedStateDictConfig | ShardedOptimStateDictConfig):
                    config._use_dtensor = True
        return settings

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """`set_state_dict_type` for the duration of the context, even if an exception ends it."""
        before = StateDictApi.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for one in _fsdp_modules(module):
                one._state_dict_settings = before


def _fsdp_modules(module: nn.Module) -> list[StateDictApi]:
    return [one for one in module.modules() if isinstance(one, StateDictApi)]


def _settings(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    kind = own(StateDictType, kind, "state_dict_type")
    expected, expected_optim = _CONFIGS[kind]
    config = expected() if config is None else own(StateDictConfig, config, "state_dict_config")
    if optim_config is None:
        optim_config = expected_optim()
    else:
        optim_config = own(OptimStateDictConfig, optim_config, "optim_state_dict_config")
    if type(config) is not expected:
        raise RuntimeError(f"{kind} needs a {expected.__name__} as state_dict_config, got {type(config).__name__}")
    if type(optim_config) is not expected_optim:
        raise RuntimeError(
            f"{kind} needs a {expected_optim.__name__} as optim_state_dict_config, got {type(optim_config).__name__}"
        )
    return StateDictSettings(kind, config, optim_config)
