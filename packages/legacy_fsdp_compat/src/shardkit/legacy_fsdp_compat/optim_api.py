"""The optimizer methods of FSDP1's API."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.legacy_fsdp_compat.api import OptimStateKeyType, ShardedOptimStateDictConfig, StateDictType, own
from shardkit.legacy_fsdp_compat.optimizer_names import ParameterNames, key_of_each
from shardkit.legacy_fsdp_compat.optimizer_state import Shape, named_state, state_to_load
from shardkit.legacy_fsdp_compat.state_dict_types import StateDictApi

__all__ = ["OptimizerStateApi"]

State = dict[str, Any]
OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class OptimizerStateApi:
    """FSDP's methods for optimizer state. Every method is collective unless it says otherwise."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: State | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """The optimizer's state by parameter name, in the form that the state dict type of `model` selects.

        Args:
            model: the model whose parameters the optimizer holds; FSDP, or with FSDP modules below it.
            optim: the optimizer.
            optim_state_dict: what to convert; default: `optim.state_dict()`.
            group: the ranks that share the model; default: all.

        Returns:
            "state": name -> state name -> value, and "param_groups" with names in "params". With FULL_STATE_DICT values
            are whole (on the first rank only, if so configured); otherwise they are ShardedTensors or DTensors.
        """
        settings = StateDictApi.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        shape = Shape(
            full=settings.state_dict_type is StateDictType.FULL_STATE_DICT,
            rank0_only=getattr(config, "rank0_only", False),
            offload=config.offload_to_cpu,
            as_dtensor=isinstance(config, ShardedOptimStateDictConfig) and config._use_dtensor,
        )
        return named_state(model, optim, optim_state_dict or optim.state_dict(), None, shape, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: State,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """Converts a result of `optim_state_dict`, from here or stock FSDP1, for `optim.load_state_dict`.

        Args:
            model: as for `optim_state_dict`; its state dict type says what the values are.
            optim: the optimizer that will load.
            optim_state_dict: the state, by name; with `rank0_only` it is read on the first rank only.
            is_named_optimizer: whether the optimizer's own state dict has names as keys.
            load_directly: also load it.
            group: the ranks that share the model; default: all.

        Raises:
            ValueError: if values do not fit their parameter.
        """
        settings = StateDictApi.get_state_dict_type(model)
        loadable = state_to_load(
            model,
            optim,
            optim_state_dict,
            None,
            full=settings.state_dict_type is StateDictType.FULL_STATE_DICT,
            from_rank0=getattr(settings.optim_state_dict_config, "rank0_only", False),
            by_name=is_named_optimizer,
            group=group,
        )
        if load_directly:
            optim.load_state_dict(loadable)
        return loadable

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """The optimizer's whole state by name, on the CPU; with `rank0_only`, an empty dict on other ranks."""
        shape = Shape(full=True, rank0_only=rank0_only)
        return named_state(model, optim, optim.state_dict(), optim_input, shape, group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> State:
        """The optimizer's state by name, each rank its rows, as ShardedTensors (DTensors if FSDP got a mesh)."""
        config = StateDictApi.get_state_dict_type(model).optim_state_dict_config
        dtensor = isinstance(config, ShardedOptimStateDictConfig) and config._use_dtensor
        return named_state(model, optim, optim.state_dict(), None, Shape(full=False, as_dtensor=dtensor), group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: State,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> State:
        """The state for this rank's optimizer to load, from a whole state that every rank has. Not collective."""
        return state_to_load(
            model, optim, full_optim_state_dict, optim_input, full=True, from_rank0=False, by_name=False, group=None
        )

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: State | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """The state for this rank's optimizer to load, from a whole state that only the first rank has.

        Raises:
            ValueError: on every rank, if the first rank has no state.
        """
        return state_to_load(
            model,
            optim,
            {} if full_optim_state_dict is None else full_optim_state_dict,
            optim_input,
            full=True,
            from_rank0=True,
            by_name=False,
            group=group,
        )

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: State, model: nn.Module, optim: torch.optim.Optimizer
    ) -> State:
        """The state for this rank's optimizer to load, from `sharded_optim_state_dict` on the same number of ranks."""
        return state_to_load(
            model, optim, sharded_optim_state_dict, None, full=False, from_rank0=False, by_name=False, group=None
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: State,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> State:
        """Replaces numbers by names or names by numbers, for a model without FSDP. Not collective.

        Raises:
            ValueError: if the keys are neither all names nor all numbers, or name something that the model or the
                optimizer lacks.
        """
        wanted = own(OptimStateKeyType, optim_state_key_type, "optim_state_key_type")
        listed = [key for one in optim_state_dict["param_groups"] for key in one["params"]]
        kinds = {type(key) for key in (*optim_state_dict["state"], *listed)}
        target = str if wanted is OptimStateKeyType.PARAM_NAME else int
        if not kinds <= {int} and not kinds <= {str}:
            raise ValueError(
                f"expected names or numbers as keys, got {list(optim_state_dict['state'])}; pass a state dict with "
                "keys of one kind"
            )
        if kinds == {target}:
            return optim_state_dict
        number_of = key_of_each(ParameterNames(model), optim, optim_input)
        change: dict[Any, Any] = dict(number_of)
        if target is str:
            change = {number: fqn for fqn, number in number_of.items()}
        unknown = [key for key in dict.fromkeys([*optim_state_dict["state"], *listed]) if key not in change]
        if unknown:
            raise ValueError(
                f"the optimizer state has {unknown}, expected some of {sorted(change, key=str)}; "
                "give the model and the optimizer that it was saved from"
            )
        groups = copy.deepcopy(optim_state_dict["param_groups"])
        for one in groups:
            one["params"] = sorted(change[key] for key in one["params"])
        state = {change[key]: value for key, value in optim_state_dict["state"].items()}
        return {"state": state, "param_groups": groups}
