"""Private names of stock FSDP2 that trainers and torch read, answered by our states, groups and parameters.

`NAMES` lists each name and its readers. Every name is read-only: stock lets callers write to some of them, but a write
here would have no effect, so it raises. An unsupported name raises with the name of an alternative. The error is an
AttributeError, so software that checks with `hasattr` continues without the name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, TypeVar

from shardkit.core.torch_compat import in_backward, stock_training_state

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["NAMES", "MeshInfo", "StockName", "answers_stock_names"]

Owner: TypeAlias = Literal["state", "group", "param"]
_C = TypeVar("_C", bound=type)


@dataclass(frozen=True)
class StockName:
    """One private name of stock.

    Attributes:
        owner: the class that has the attribute: the state (`module._get_fsdp_state()`), a parameter group
            (`state._fsdp_param_groups`), or a parameter (`group.fsdp_params`).
        name: the name in stock.
        read_by: the software that reads it.
        answer: makes the value from the owner; None if the name is not supported.
        instead: the alternative to writing to the name, or to an unsupported name.
    """

    owner: Owner
    name: str
    read_by: str
    answer: Callable[[Any], Any] | None
    instead: str


@dataclass(frozen=True)
class MeshInfo:
    """The contents of stock's `FSDPMeshInfo`, `DDPMeshInfo` and `HSDPMeshInfo`; None for a missing axis."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None
    shard_mesh_size: int
    shard_mesh_rank: int
    shard_process_group: dist.ProcessGroup | None
    replicate_mesh_dim: int | None
    replicate_mesh_size: int
    replicate_mesh_rank: int
    replicate_process_group: dist.ProcessGroup | None


def _mesh_info(group: Any) -> MeshInfo:
    mesh, replicate = group.mesh, group.mesh.replicate_axes[0] if len(group.mesh.replicate_axes) == 1 else None
    if replicate is None and group.mesh.replicate_axes:
        raise AttributeError(
            f"the group of '{group.label}' is replicated over {len(group.mesh.replicate_axes)} axes of its mesh, which "
            "torch's mesh_info cannot describe; read the group's `mesh`"
        )
    return MeshInfo(
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


def _state_phase(state: Any) -> Any:
    return stock_training_state(state.phase.name)


def _group_phase(group: Any) -> Any:
    """The phase of a group; a gather that backward prefetches counts as backward, whatever its module does."""
    phase = group.phase.name
    if phase == "IDLE" and in_backward():
        phase = "PRE_BACKWARD"
    elif phase == "IDLE" and any(user.phase.name == "FORWARD" for user in group.users):
        phase = "FORWARD"
    return stock_training_state(phase)


_TRACKER = "`shardkit profile` or `shardkit estimate`; FSDPMemTracker works on torch's own fully_shard alone"
_PREFETCH = "module.set_modules_to_forward_prefetch() and set_modules_to_backward_prefetch()"
_SETTERS = "the set_* methods of the module"
_ENGINE = "nothing: the engine keeps it"
_PARAMETER = "the module's parameters"

NAMES: tuple[StockName, ...] = (
    # -- state -----------------------------------------------------------------------------------------------------
    StockName("state", "_fsdp_param_groups", "torch pipelining", lambda state: state.groups, _ENGINE),
    StockName("state", "_fsdp_param_group", "verl, NeMo Automodel, Transformer Engine", _only_group, _ENGINE),
    StockName("state", "_state_ctx", "torch pipelining", lambda state: state.schedule, _ENGINE),
    StockName("state", "_comm_ctx", "torch 2.15 pipelining", lambda state: state.schedule.context, "share_comm_ctx()"),
    StockName("state", "_mp_policy", "NeMo Automodel", lambda state: state.mp_policy, "fully_shard(mp_policy=...)"),
    StockName("state", "_training_state", "verl", _state_phase, _ENGINE),
    StockName("state", "_is_root", "torch's tests, NeMo Automodel", lambda state: state.is_root, _ENGINE),
    StockName(
        "state",
        "_root_post_backward_final_callback",
        "torch pipelining",
        lambda state: state.end_backward,
        _ENGINE,
    ),
    StockName("state", "_auto_reshard_after_forward", "torch's tests", lambda state: state.auto_reshard, _SETTERS),
    StockName("state", "_states_to_forward_prefetch", "custom prefetching", None, _PREFETCH),
    StockName("state", "_states_to_backward_prefetch", "custom prefetching", None, _PREFETCH),
    StockName("state", "_pre_forward", "torch FSDPMemTracker", None, _TRACKER),
    StockName("state", "_post_forward", "torch FSDPMemTracker", None, _TRACKER),
    StockName("state", "_pre_forward_hook_handle", "torch FSDPMemTracker", None, _TRACKER),
    StockName("state", "_post_forward_hook_handle", "torch FSDPMemTracker", None, _TRACKER),
    # -- group: post_backward(), unshard(), reshard(), wait_for_unshard(), is_unsharded, mp_policy and device have
    # stock's names already
    StockName(
        "group", "fsdp_params", "torchtune, Muon and SignSGD optimizers", lambda group: list(group.params), _PARAMETER
    ),
    StockName("group", "mesh_info", "verl, torchtitan", _mesh_info, "fully_shard(mesh=...)"),
    StockName("group", "_training_state", "Transformer Engine, verl", _group_phase, _ENGINE),
    StockName("group", "comm_ctx", "torch pipelining", lambda group: group.schedule.context, "share_comm_ctx()"),
    StockName("group", "_module_fqn", "error messages", lambda group: group.label, _ENGINE),
    StockName(
        "group",
        "_reshard_after_forward",
        "Transformer Engine",
        lambda group: group.settings.reshard_after_forward,
        "module.set_reshard_after_forward()",
    ),
    StockName("group", "pre_backward", "torch FSDPMemTracker", None, _TRACKER),
    StockName("group", "_all_gather_result", "custom prefetching", None, "module.unshard() and module.reshard()"),
    # -- parameter: sharded_param, unsharded_param and orig_dtype have stock's names already
    StockName("param", "_param_fqn", "error messages", lambda param: param.fqn, _ENGINE),
    StockName("param", "_orig_size", "Muon optimizers", lambda param: param.shape, _PARAMETER),
    StockName(
        "param", "sharded_size", "Lightning's tests", lambda param: param.sharded_param.to_local().shape, _PARAMETER
    ),
    StockName("param", "_sharded_param_data", "torch's tests", None, "sharded_param.to_local()"),
    StockName("param", "_unsharded_param", "torch FSDPMemTracker", None, _TRACKER),
)


class _Answer:
    """The descriptor of a `StockName`: a read-only property, or one that raises."""

    def __init__(self, row: StockName) -> None:
        self._row = row

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        if owner is None:
            return self
        if self._row.answer is None:
            raise AttributeError(f"{self._of(owner)} has no {self._row.name}; use instead: {self._row.instead}")
        return self._row.answer(owner)

    def __set__(self, owner: Any, value: object) -> NoReturn:
        raise AttributeError(
            f"{self._row.name} of {self._of(owner)} is read-only here, a write would change nothing; use instead: "
            f"{self._row.instead}"
        )

    def _of(self, owner: Any) -> str:
        kind = {"state": "the state", "group": "the parameter group", "param": "the parameter"}[self._row.owner]
        return f"{kind} of '{owner.label if self._row.owner == 'group' else owner.fqn}'"


def answers_stock_names(owner: Owner) -> Callable[[_C], _C]:
    """Decorates the class of our states, groups or parameters with its rows of `NAMES`."""

    def decorate(cls: _C) -> _C:
        for row in NAMES:
            if row.owner == owner:
                assert not hasattr(cls, row.name), row.name
                setattr(cls, row.name, _Answer(row))
        return cls

    return decorate
