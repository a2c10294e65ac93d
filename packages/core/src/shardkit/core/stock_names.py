"""Private names of stock FSDP2 that trainers and torch read, answered by our states, groups and parameters.

They are properties, so a write, which would have no effect here, raises. Names that only torch's FSDPMemTracker reads
are missing on purpose: it works on torch's own fully_shard alone; `shardkit profile` counts memory here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeVar

from shardkit.core.torch_compat import in_backward, stock_training_state

_C = TypeVar("_C", bound=type)


def _mesh_info(group: Any) -> SimpleNamespace:
    """The contents of stock's `FSDPMeshInfo`, `DDPMeshInfo` and `HSDPMeshInfo`; None for a missing axis."""
    mesh, replicate = group.mesh, group.mesh.replicate_axes[0] if len(group.mesh.replicate_axes) == 1 else None
    if replicate is None and group.mesh.replicate_axes:
        raise AttributeError(
            f"the group of '{group.label}' is replicated over {len(group.mesh.replicate_axes)} axes of its mesh, which "
            "torch's mesh_info cannot describe; read the group's `mesh`"
        )
    return SimpleNamespace(
        mesh=mesh.mesh,
        shard_mesh_dim=mesh.shard_axis,
        shard_mesh_size=mesh.shard_size,
        shard_mesh_rank=mesh.shard_rank,
        shard_process_group=mesh.shard_group,
        replicate_mesh_dim=replicate,
        replicate_mesh_size=1 if replicate is None else mesh.mesh.size(replicate),
        replicate_mesh_rank=0 if replicate is None else mesh.mesh.get_local_rank(replicate),
        replicate_process_group=None if replicate is None else mesh.replicate_groups[0],
    )


def _only_group(state: Any) -> Any:
    """The single group of a state; None without parameters. Raises for several groups, as stock's property does."""
    if len(state.groups) > 1:
        labels = ", ".join(f"'{group.label}'" for group in state.groups)
        raise AttributeError(
            f"the state of '{state.fqn}' has {len(state.groups)} parameter groups ({labels}), so it has no "
            "_fsdp_param_group; read _fsdp_param_groups"
        )
    return state.groups[0] if state.groups else None


def _group_phase(group: Any) -> Any:
    """The phase of a group; a gather that backward prefetches counts as backward, whatever its module does."""
    if group.was_left:
        return stock_training_state("POST_BACKWARD")
    if group.backward_users or in_backward():
        return stock_training_state("PRE_BACKWARD")
    return stock_training_state("FORWARD" if any(user.in_forward for user in group.users) else "IDLE")


def _state_phase(state: Any) -> Any:
    return stock_training_state("PRE_BACKWARD" if state.in_backward else "FORWARD" if state.in_forward else "IDLE")


STATE_NAMES: Mapping[str, Callable[[Any], Any]] = {
    "_fsdp_param_groups": attrgetter("groups"),  # torch pipelining
    "_fsdp_param_group": _only_group,  # verl, NeMo Automodel, Transformer Engine
    "_state_ctx": attrgetter("schedule"),  # torch pipelining
    "_comm_ctx": attrgetter("schedule.context"),  # torch 2.15 pipelining
    "_mp_policy": attrgetter("mp_policy"),  # NeMo Automodel
    "_training_state": _state_phase,  # verl
    "_is_root": attrgetter("is_root"),  # torch's tests, NeMo Automodel
    "_root_post_backward_final_callback": attrgetter("end_backward"),  # torch pipelining
    "_auto_reshard_after_forward": attrgetter("auto_reshard"),  # torch's tests
}
"""Of a state, `module._get_fsdp_state()`."""

# post_backward(), unshard(), reshard(), wait_for_unshard(), is_unsharded, mp_policy and device have stock's names.
GROUP_NAMES: Mapping[str, Callable[[Any], Any]] = {
    "fsdp_params": lambda group: list(group.params),  # torchtune, Muon and SignSGD optimizers
    "mesh_info": _mesh_info,  # verl, torchtitan
    "_training_state": _group_phase,  # Transformer Engine, verl
    "comm_ctx": attrgetter("schedule.context"),  # torch pipelining
    "_module_fqn": attrgetter("label"),  # error messages
    "_reshard_after_forward": attrgetter("settings.reshard_after_forward"),  # Transformer Engine
}
"""Of a parameter group, `state._fsdp_param_groups`."""

# sharded_param and unsharded_param have stock's names.
PARAM_NAMES: Mapping[str, Callable[[Any], Any]] = {
    "_param_fqn": attrgetter("fqn"),  # error messages
    "_orig_size": attrgetter("shape"),  # Muon optimizers
    "orig_dtype": attrgetter("shard.tensor.dtype"),  # quantizers of weights
    "sharded_size": lambda param: param.sharded_param.to_local().shape,  # Lightning's tests
}
"""Of a parameter, `group.fsdp_params`."""


def answers_stock_names(names: Mapping[str, Callable[[Any], Any]]) -> Callable[[_C], _C]:
    """Decorates the class of our states, groups or parameters with its properties."""

    def decorate(cls: _C) -> _C:
        for name, answer in names.items():
            assert not hasattr(cls, name), name
            setattr(cls, name, property(answer))
        return cls

    return decorate
