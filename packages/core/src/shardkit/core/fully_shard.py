"""`fully_shard`: shards the parameters of a module."""

from __future__ import annotations

import atexit
import functools
import types
import weakref
from collections.abc import Sequence
from itertools import starmap
from typing import Any, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.core.engine.group import FSDPParamGroup
from shardkit.core.engine.step import FSDPState, state_of
from shardkit.core.mesh import (
    DataParallelMesh,
    PostForwardMesh,
    data_parallel_mesh,
    default_mesh,
    device_of,
    post_forward_mesh,
)
from shardkit.core.module import FSDPModule, refuse_deepcopy
from shardkit.core.observers import start_observers
from shardkit.core.optimizers import watch_optimizers
from shardkit.core.parameters.collect import Managed, PlacementFn, manage, modules_of_argument, place
from shardkit.core.parameters.gradients import move_gradient_hooks
from shardkit.core.parameters.param import FSDPParam, Slot
from shardkit.core.policies import (
    CompressionPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadChoice,
    OffloadPolicy,
    as_mesh_dims,
    as_mixed_precision,
    offload_of_each,
)
from shardkit.core.runtime.gloo_threads import wait_for_threads
from shardkit.core.torch_compat import mark_managed

atexit.register(wait_for_threads)


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadChoice = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    compression_policy: CompressionPolicy | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadChoice = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    compression_policy: CompressionPolicy | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadChoice = OffloadPolicy(),  # noqa: B008 - frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    compression_policy: CompressionPolicy | None = None,
) -> Any:
    """Shards the parameters of a module over the ranks of a mesh, in place, and returns it.

    Call it bottom-up: each call makes one group of the parameters that no earlier call below has taken. A group is
    gathered before its module's forward and backward, and its gradients are reduced after backward. Sharded parameters
    are DTensors with the placements and local shapes of `torch.chunk`, as stock `fully_shard` makes them.

    Args:
        module: the module, or a list of modules that are gathered and reduced together.
        mesh: 1-D: parameters are sharded over it. 2-D with names: replicated over its first axis, sharded over its
            second (HSDP); names such as ("dp_shard", "cp") get a warning. Default: all ranks.
        reshard_after_forward: True frees the parameters after forward and gathers them again for backward; False keeps
            them; an int keeps them sharded over that many neighbouring ranks, which must divide the shard axis; None
            means True, except for the root.
        shard_placement_fn: chooses the placement of each parameter: `Shard(dim)`, evenly divisible or not; `Owned()`
            keeps it whole on one rank; `Blocks(...)` cuts it only between blocks; None means `Shard(0)`. `Replicate()`
            keeps it whole on all ranks, as every 0-dim parameter. `placements_for(model, optimizer_class)` returns such
            a function. A result with a `mesh_info`, such as stock's `ShardPlacementResult`, gives the parameter its own
            mesh: the call then makes one group for each mesh and averages that group's gradients over it.
        mp_policy: dtypes of computation, reduction and output.
        offload_policy: `CPUOffloadPolicy()` keeps shards, gradients and optimizer state in host memory. A mapping does
            so by name, such as `{"experts.*": CPUOffloadPolicy()}`; names are those below `module`.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: names the data-parallel axes of a `mesh` that has other axes as well.
        compression_policy: rounds parameters and gradients of two and more dims to fewer bytes on the network.

    Returns:
        The same object; the class of a sharded module becomes a subclass `FSDP<Name>` of its own and of `FSDPModule`.

    Raises:
        ValueError, TypeError: for unusable input, naming the parameter or module.

    Not collective, except that an int for `reshard_after_forward` may make a process group. All ranks must make the
    same calls; the first forward compares their parameters and groups.
    """
    modules = modules_of_argument(module)
    mesh = mesh if mesh is not None else default_mesh()
    data_parallel = data_parallel_mesh(mesh, as_mesh_dims(dp_mesh_dims))
    device = device_of(mesh)
    start_observers()
    policy = as_mixed_precision(mp_policy)
    if not isinstance(compression_policy, CompressionPolicy | None):
        raise TypeError(f"compression_policy must be a CompressionPolicy, got {type(compression_policy).__name__}")
    managed = manage(modules, ignored_params or set())
    if managed.ties:
        _refuse_inside_sharded(modules, managed)
    # Everything that can reject the input runs first, so a call that raises leaves the module unchanged.
    placed = place(managed.parameters, shard_placement_fn, data_parallel)
    settings = {mesh: _reshard_setting(reshard_after_forward, mesh) for mesh in (data_parallel, *placed)}
    shard_bytes = {one.fqn: -(-one.plain.nbytes // one.mesh.shard_size) for one in managed.parameters}
    offload = offload_of_each(offload_policy, shard_bytes)
    for param, _ in managed.ties:
        _check_tie(param, data_parallel, policy, compression_policy)
    for buffer in managed.buffers:
        if buffer.device != device and buffer.device.type != "meta":  # `materialize` handles those
            buffer.data = buffer.to(device)
    state = FSDPState(modules, device, policy, auto_reshard=reshard_after_forward is None)
    for mesh_of_group, parameters in placed.items():
        reshard, smaller = settings[mesh_of_group]
        main: list[FSDPParam] = []
        whole: list[FSDPParam] = []
        for one in parameters:
            where = list(starmap(Slot.of, one.holders)), one.mesh, one.placement
            param = FSDPParam(one.parameter, one.fqn, *where, one.form, device, policy, offload[one.fqn])
            move_gradient_hooks(
                one.parameter, param.sharded_param, functools.partial(_fqn_of, weakref.ref(param), one.fqn)
            )
            (main if one.placement is not None else whole).append(param)
        if main:
            state.add_group(FSDPParamGroup(main, mesh_of_group, device, policy, reshard, smaller, compression_policy))
        if whole:
            state.add_group(FSDPParamGroup(whole, whole[0].mesh, device, policy, reshard, None))
    for param, slots in managed.ties:
        _join_tie(state, param, slots)
    for one_module in managed.modules:
        mark_managed(one_module)
        if one_module in modules or any(parameter is not None for parameter in one_module._parameters.values()):
            one_module.register_state_dict_pre_hook(state.to_sharded)
            one_module.register_load_state_dict_pre_hook(state.before_load)
    for one_module in modules:
        one_module.register_load_state_dict_post_hook(state.after_load)
        kind: Any = type(one_module)
        one_module.__class__ = _sharded_class(kind)
    watch_optimizers()
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


@functools.cache
def _sharded_class(cls: Any) -> type:
    """The subclass `FSDP<Name>` of `cls` that becomes the class of sharded modules."""
    body = {"__deepcopy__": refuse_deepcopy, "__module__": cls.__module__}
    return types.new_class(f"FSDP{cls.__name__}", (FSDPModule, cls), exec_body=lambda namespace: namespace.update(body))


def _fqn_of(reference: weakref.ReferenceType[FSDPParam], otherwise: str) -> str:
    return otherwise if (param := reference()) is None else param.fqn


def _reshard_setting(value: bool | int | None, mesh: DataParallelMesh) -> tuple[bool, PostForwardMesh | None]:
    if value is None or isinstance(value, bool):
        return value is not False, None
    if not isinstance(value, int):
        raise ValueError(f"reshard_after_forward must be a bool, an int or None, got {value!r}")
    smaller = post_forward_mesh(mesh, value)
    if smaller is not None and smaller.size == 1:  # the parameters stay on this rank, as with False
        return False, None
    return True, smaller


def _refuse_inside_sharded(modules: Sequence[nn.Module], managed: Managed) -> None:
    """Refuses a module whose parameters are in the group of a module around it, unless it brings others (adapters)."""
    new = {id(holder) for one in managed.parameters for holder, _ in one.holders}
    if any(id(below) in new for module in modules for below in module.modules()):
        return
    around = (one() for param, _ in managed.ties for user in FSDPParamGroup.of(param).users for one in user.modules)
    inside = {below for outer in around if outer is not None for below in outer.modules()}
    for param, slots in managed.ties:  # a tie that was assigned later is in no slot of the group
        if inside.intersection(modules) and any(slot in param.slots for slot in slots):
            raise ValueError(
                f"parameter '{param.fqn}' of this {type(modules[0]).__name__} is already in the group of a module "
                "around it. Call fully_shard on inner modules first, then on the modules around them"
            )


def _check_tie(
    param: FSDPParam, mesh: DataParallelMesh, policy: MixedPrecisionPolicy, compression: CompressionPolicy | None
) -> None:
    """A tied parameter has one mesh and one set of dtypes, whichever of its modules runs; it stays where it is."""
    group = FSDPParamGroup.of(param)  # an override may know the original by its identity, so the same one is not asked
    own = param.dtypes.policy if policy == group.mp_policy else policy.for_parameter(param.sharded_param, param.fqn)
    rounding = group.settings.communication.compression if param.shape else compression
    theirs = (param.mesh.mesh, param.dtypes.policy.param_dtype, param.dtypes.policy.reduce_dtype, rounding)
    ours = (mesh.mesh, own.param_dtype, own.reduce_dtype, compression)
    if theirs != ours:
        raise ValueError(
            f"parameter '{param.fqn}' is tied to one that an earlier fully_shard call has sharded with (mesh, "
            f"param_dtype, reduce_dtype, compression) = {theirs}; this call has {ours}. Give both calls the same"
        )


def _join_tie(state: FSDPState, param: FSDPParam, slots: Sequence[Slot]) -> None:
    """A parameter of an earlier call that this call's modules hold too becomes a group that both calls use."""
    param.slots.extend(slot for slot in slots if slot not in param.slots)
    param.register(param.sharded_param)
    group = FSDPParamGroup.of(param)
    group.reshard()
    if len(group.params) > 1:
        shared = group.split_off(param)
        for user in list(group.users):
            user.add_group(shared)
        group = shared
    group.plans = None
    state.add_group(group)
