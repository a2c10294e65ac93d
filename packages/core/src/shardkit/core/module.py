"""FSDPModule: the methods that a sharded module gains, with the names and meanings of stock FSDP2's."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import deprecated

from shardkit.core.engine.group import FSDPParamGroup
from shardkit.core.engine.schedule import Finalization, Schedule
from shardkit.core.engine.settings import Prefetch
from shardkit.core.engine.step import FSDPState, finalize_backward, reset, state_of
from shardkit.core.parameters.param import FSDPParam, user_attributes
from shardkit.core.policies import AllGather, ReduceScatter
from shardkit.core.torch_compat import (
    StockFSDPModule,
    StockGradientReductionHandle,
    StockUnshardHandle,
    no_dynamo,
    no_dynamo_frame,
)


class UnshardHandle(StockUnshardHandle):
    """The handle that `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        self._groups: Sequence[FSDPParamGroup] = groups

    @no_dynamo
    def wait(self) -> None:
        """Waits for the gather; afterwards the unsharded parameters are registered on the module. Idempotent."""
        for group in self._groups:
            group.wait_for_unshard()
        for context in {group.schedule.context for group in self._groups}:
            context.wait_until_peers_have_read()
        self._groups = ()


class GradientReductionHandle(StockGradientReductionHandle):  # type: ignore[misc]
    """The handle that `FSDPModule.finalize_backward(async_op=True)` returns."""

    def __init__(self, finalization: Finalization | None) -> None:
        self._finalization = finalization

    @no_dynamo
    def wait(self) -> None:
        """Waits for the reductions; afterwards the sharded gradients may be read. Idempotent.

        Raises:
            RuntimeError: if `reset_iter_state` has dropped the iteration.
        """
        if self._finalization is not None:
            self._finalization.wait()
        self._finalization = None


class FSDPModule(StockFSDPModule):
    """A module that `fully_shard` was called on. It keeps its own class as a base, so `isinstance` holds for both."""

    _orig_cls_mro_index = 3  # [FSDP<Name>, FSDPModule, stock's FSDPModule, <Name>, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructs the original class: containers construct new instances of themselves when sliced."""
        original = cls.__mro__[cls.__mro__.index(StockFSDPModule) + 1]
        module = original.__new__(original, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return module

    def _get_fsdp_state(self) -> FSDPState:  # type: ignore[override]
        state = state_of(cast(nn.Module, self))
        if state is None:
            raise RuntimeError(f"this {type(self).__name__} has lost its FSDP state; call fully_shard on it")
        return state

    # -- unshard and reshard -------------------------------------------------------------------------------------------

    @no_dynamo
    def reshard(self) -> None:
        """Frees this module's unsharded parameters and registers the sharded ones. Not recursive.

        Does nothing after an error in forward or backward, for `finally` blocks: `reset_iter_state` does it then.
        """
        if self._get_fsdp_state().schedule.unended(inside=True):
            return
        for group in groups_of(self):
            group.reshard()
            group.schedule.context.wait_until_peers_have_read()

    @no_dynamo
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's parameters, in `param_dtype` (collective over the shard group). Not recursive.

        Args:
            async_op: return a handle at once. `handle.wait()`, or the module's own forward, then waits for the gather.
                Otherwise waits here and returns None.
        """
        groups = groups_of(self)
        state = self._get_fsdp_state()
        state.schedule.refuse_unended(f"unshard() of '{state.fqn}' is called", inside=True)
        for group in groups:
            group.sweep()
        for group in groups:
            group.unshard()
            group.held_by_user = True
        handle = UnshardHandle(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Recovers from an exception in forward or backward: call it on the root, then run the next iteration.

        Waits for communication in flight, reshards every module, and drops unsharded gradients, including those
        accumulated without sync or without all-reduce. Sharded gradients stay before torch 2.15, even those of the
        failed iteration: call `optimizer.zero_grad()`.

        Raises:
            RuntimeError: if this module is not the root, or if the finalization of another root that shares the
                communication context has not been waited for.
        """
        reset(_root_schedule(self, "reset_iter_state"))

    # -- when gradients are reduced ------------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Sets whether the next backward is the last of the step and waits for all reductions. Call on the root.

        On a CPU every backward waits for them.
        """
        self._get_fsdp_state().schedule.is_last_backward = _flag("is_last_backward", is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Sets whether a step ends with `finalize_backward` instead of its last backward. Call on the root.

        For steps of several backwards, as in a pipeline. `set_is_last_backward` has no effect while this is on.

        Raises:
            RuntimeError: below the root, during a backward, or between a backward and its finalization.
        """
        _root_schedule(self, "set_manual_backward_finalization").set_manual_finalization(enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    @no_dynamo
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Ends a step: reduces the waiting gradients and reshards (collective over the shard group).

        Call it on the root after `set_manual_backward_finalization(True)` and all backwards of the step, not between a
        forward and its backward. For several backwards, turn gradient sync off during them and on again before this
        call. Before the first forward it does nothing. Wait for the handle before you read gradients, and before the
        next forward of this root or of a root that shares its communication context.

        Raises:
            RuntimeError: below the root, without manual finalization, during a backward, or while another finalization
                of the communication context has not been waited for.
        """
        state = self._get_fsdp_state()
        if state.is_root is None:
            return GradientReductionHandle(None) if async_op else None
        finalization = finalize_backward(_root_schedule(self, "finalize_backward"))
        if async_op:
            return GradientReductionHandle(finalization)
        finalization.wait()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets whether backward reduces gradients; if not, they accumulate unsharded in `reduce_dtype`.

        They wait for a backward with sync, or for `synchronize_gradients`. `parameter.grad` does not show them, and
        `optimizer.zero_grad()` does not drop them; `zero_grad()` of this module does.

        Raises:
            ValueError: for anything but True and False, as all setters of this kind.
        """
        sync = _flag("requires_gradient_sync", requires_gradient_sync)
        _set(self, recurse, reduce_grads=sync, all_reduce_grads=sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP: sets whether backward all-reduces over replicas; if not, reduce-scattered gradients accumulate."""
        _set(self, recurse, all_reduce_grads=_flag("requires_all_reduce", requires_all_reduce))

    @no_dynamo
    def synchronize_gradients(self, *, recurse: bool = True) -> None:
        """Reduces the gradients that backwards without gradient sync, or without all-reduce, have left (collective).

        Call it after a backward, on all ranks. Afterwards sharded parameters have the gradients that a backward with
        sync would have given them. Settings stay as they are.

        Raises:
            RuntimeError: during a backward, or before an asynchronous finalization has been waited for.
        """
        schedule = self._get_fsdp_state().schedule
        schedule.refuse_in_backward("synchronize_gradients")
        for group in reversed(groups_of(self, recurse)):
            group.synchronize_gradients()
        schedule.context.finish_reductions()

    def get_pending_gradients(
        self, *, recurse: bool = True
    ) -> dict[nn.Parameter, tuple[torch.Tensor | None, torch.Tensor | None]]:
        """The gradients that backwards without gradient sync, or without all-reduce, have left on this rank.

        For each sharded parameter that has one: the unreduced gradient, of the whole parameter's shape, and HSDP's sum
        over the shard group, of the shape of this rank's shard; either may be None. They are not copies: writes to them
        go into the reduction. Neither contains `parameter.grad`.

        Raises:
            RuntimeError: as `synchronize_gradients`.
        """
        schedule = self._get_fsdp_state().schedule
        schedule.refuse_in_backward("get_pending_gradients")
        schedule.context.finish_reductions()
        pending = ((param.sharded_param, param.pending) for param in _params(self, recurse))
        return {parameter: two for parameter, two in pending if any(one is not None for one in two)}

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the sum of gradients by `factor` instead of by the number of data-parallel ranks."""
        if not factor > 0:
            raise ValueError(f"the gradient divide factor must be a positive number, got {factor}")
        _set(self, gradient_divide_factor=factor)

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sets whether collectives only sum and gradients are divided by separate operations."""
        _set(self, force_sum_reduction=_flag("enable", enable))

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Sets whether parameters without a gradient are reduced as zeros, for ranks that take different branches."""
        _set(self, recurse, reduce_unused_params=_flag("reduce_scatter_unused_params", reduce_scatter_unused_params))

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Limits how many groups' unsharded gradients may be in reduction at once: fewer save memory, more overlap."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}")
        _set(self, recurse, max_reduce_inputs=max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Sets whether reductions use their own process group (collective: makes one for each shard group).

        A change takes effect at the next gather, for the reductions after it.
        """
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in groups_of(self, recurse):
            shard = group.mesh.shard_group
            ranks = () if shard is None else tuple(dist.get_process_group_ranks(shard))
            if enable and ranks and ranks not in made:
                made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
            reduce_group = made[ranks] if enable and ranks else None
            group.change(communication=replace(group.settings.communication, reduce_group=reduce_group))

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Runs `hook` in place on every flat reduced gradient, after HSDP's all-reduce if there is one.

        Args:
            hook: receives the 1-D reduced gradients of a group, in `reduce_dtype`.
            stream: the stream that runs the hook; only without native HSDP.
        """
        for group in groups_of(self):
            if stream is not None and group.mesh.shard_axis is not None and group.mesh.replicate_axes:
                raise ValueError(f"group '{group.label}': stream cannot be set together with native HSDP; leave it out")
        _set(self, all_reduce_hook=hook, all_reduce_hook_stream=stream)

    # -- when parameters are freed and gathered ------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Changes the `reshard_after_forward` of `fully_shard`."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward takes a bool, got {reshard_after_forward!r}")
        for state in _states(self, recurse):
            state.auto_reshard = False
        _set(self, recurse, reshard_after_forward=reshard_after_forward, post_forward_mesh=None)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Sets whether backward frees unsharded parameters; keeping them saves the next forward's gather."""
        _set(self, recurse, reshard_after_backward=_flag("reshard_after_backward", reshard_after_backward))

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Sets whether unsharded parameters keep their memory, and so their addresses, when they are resharded.

        For CUDA graphs: each gather writes to the same memory. A prefetch budget does not count memory kept this way.
        """
        _set(self, recurse, keep_unsharded_storage=_flag("keep", keep))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Sets whether backward needs this module's parameters (an embedding's backward does not)."""
        _set(self, unshard_in_backward=_flag("unshard_in_backward", unshard_in_backward))

    def set_prefetch_depth(self, depth: int) -> None:
        """Sets how many groups are gathered ahead in forward and backward (default 1). Call it on the root.

        At most `depth + 1` groups besides the root's hold unsharded memory at a time, unless more are in use: modules
        that nest deeper, and modules none of whose inputs needs a gradient, which stay unsharded until backward ends. 0
        turns prefetching off.

        Raises:
            ValueError: for a negative depth.
        """
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ValueError(f"the prefetch depth must be an int >= 0, got {depth!r}")
        schedule = self._get_fsdp_state().schedule
        if (budget := schedule.room.prefetch.budget) is not None:
            raise ValueError(
                f"set_prefetch_depth({depth}): set_prefetch_budget({budget}) was already called; use "
                "either a depth or a budget (set_prefetch_budget(None) removes the budget)"
            )
        schedule.set_prefetch(Prefetch(depth=depth))

    def set_prefetch_budget(self, nbytes: int | None) -> None:
        """Limits the unsharded bytes of this root's groups, instead of using a depth. Call it on the root.

        The budget decides how far ahead groups are gathered. It also decides which groups stay unsharded from forward
        to backward: the next ones to be used, as many as fit. It replaces `reshard_after_forward=True`. Parameters kept
        by `reshard_after_forward=False` or `set_reshard_after_backward(False)` stay only while nothing else needs the
        room. The budget counts the unsharded parameters of all groups, including the root's, and packed buffers of
        gathers in flight. Explicit prefetch lists gather what fits; an explicit `unshard` lasts until `reshard`.

        Args:
            nbytes: the budget in bytes, the same on all ranks; must hold the largest set of nested modules. In backward
                a module runs until the gradients of its inputs are computed. If none of its inputs needs a gradient (an
                embedding, the first block, each of several towers), it runs to the end, and counts together with the
                modules that run meanwhile. If the budget is too small, forward or backward raises ValueError with the
                groups. None returns to a depth.

        Raises:
            ValueError: if `nbytes` is not a positive int or None, or if `set_prefetch_depth` was called.
        """
        if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0):
            raise ValueError(f"the prefetch budget must be a positive number of bytes or None, got {nbytes!r}")
        schedule = self._get_fsdp_state().schedule
        depth = schedule.room.prefetch.depth
        if nbytes is not None and depth is not None:
            raise ValueError(
                f"set_prefetch_budget({nbytes}): set_prefetch_depth({depth}) was already called; use either a depth or "
                "a budget"
            )
        schedule.set_prefetch(Prefetch(depth, nbytes))

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:  # type: ignore[override]
        """Sets the modules to gather when this module's forward begins, instead of those in the learned order."""
        self._get_fsdp_state().forward_prefetch = _prefetch_list("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:  # type: ignore[override]
        """Sets the modules to gather when this module's backward begins, instead of those before it in forward."""
        self._get_fsdp_state().backward_prefetch = _prefetch_list("set_modules_to_backward_prefetch", modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Sets an event, recorded after the optimizer step, for the next forward's first gather. Call on the root.

        The gather waits for the current stream as well. The event is needed only if the optimizer ran on another one.
        """
        self._get_fsdp_state().schedule.post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for compatibility. In stock it moves allocations to the compute stream; here a lane owns them."""

    # -- communication -------------------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: AllGather) -> None:  # type: ignore[override]
        """Gathers this module's parameters through `comm`, which allocates the input and output buffers.

        A change takes effect at the next gather. Does nothing on a module without sharded parameters of its own.
        """
        for group in _sharded_groups(self):
            group.change(communication=group.settings.communication.through(group.label, all_gather=comm))

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:  # type: ignore[override]
        """Reduces this module's gradients through `comm`, which allocates the input and output buffers.

        A change takes effect at the next gather, for the reductions after it. Does nothing on a module without sharded
        parameters of its own.
        """
        for group in _sharded_groups(self):
            group.change(communication=group.settings.communication.through(group.label, reduce_scatter=comm))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Sets whether the memory that this module communicates is registered with its process group.

        Unsharded parameters, packed buffers and reduced gradients are then allocated in a pool of the shard group. NCCL
        may transfer them without copies of its own. Nothing else changes: gathers and reductions in place stay in
        place. Gradients that autograd makes are not in the pool, and the pool is not registered with the groups over
        which HSDP all-reduces.

        A change takes effect at the next gather, which is then collective on the host as well.

        Raises:
            ValueError: if the backend has no allocator (gloo), or custom communication or compression is set.
        """
        for group in _sharded_groups(self):
            shard = group.mesh.shard_group
            assert shard is not None
            group.change(
                communication=group.settings.communication.in_registered_memory(
                    enable, shard, group.device, group.label
                )
            )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Does the same as `set_allocate_memory_from_process_group_for_comm(True)`.

        The memory is registered, but not as symmetric windows: NCCL would then rely on all ranks reusing the pool in
        the same order, and nothing checks that.

        Raises:
            NotImplementedError: for a backend other than NCCL.
            ValueError: as there.
        """
        if backend != "NCCL":
            raise NotImplementedError(f"symmetric memory is supported for NCCL, got {backend!r}; pass 'NCCL'")
        self.set_allocate_memory_from_process_group_for_comm(True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all parameters below this module, and drops those that have yet to be reduced.

        Sharded parameters are included while their unsharded versions are registered.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for param in _params(self, recurse=True):
            param.zero_grad(set_to_none)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Applies casts and moves (`to`, `half`, `to_empty`, ...) to the sharded parameters.

        A gradient whose dtype was set with `grad_dtype` is moved but not cast. Gradients of backwards without sync are
        moved and cast too.
        """
        state = self._get_fsdp_state()
        state.schedule.refuse_unended(f"'{state.fqn}' is cast or moved", inside=True)
        self.reshard()
        params = [param for group in groups_of(self) for param in group.params]
        attributes = [user_attributes(param.sharded_param) for param in params]
        gradients = [param.set_gradient_aside() for param in params]
        try:  # skips stock's own _apply, which reads stock's parameter groups
            return super(StockFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        finally:
            for param, put in zip(params, attributes, strict=True):
                param.sharded_param.__dict__.update(put)  # torch replaces a DTensor's attributes by those of a new one
            try:
                for group in groups_of(self):
                    group.sweep(loading=True)
            finally:
                for param, gradient in zip(params, gradients, strict=True):
                    param.put_gradient_back(gradient)


# -- functions, as a method or attribute of the user's class may have any name -----------------------------------------


def _states(module: FSDPModule, recurse: bool = False) -> Iterable[FSDPState]:
    below = cast(nn.Module, module).modules() if recurse else [cast(nn.Module, module)]
    return dict.fromkeys(state for one in below if (state := state_of(one)) is not None)


def groups_of(module: FSDPModule, recurse: bool = False) -> list[FSDPParamGroup]:
    """The groups of a module, or of all below it."""
    return [group for state in _states(module, recurse) for group in state.groups]


def _sharded_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    return [group for group in groups_of(module) if group.mesh.shard_group is not None]


def _params(module: FSDPModule, recurse: bool) -> list[FSDPParam]:
    """The parameters of a module, or of all below it. Its groups may have others: of `fully_shard([a, b])`."""
    below = {*cast(nn.Module, module).modules()}
    params = (param for group in groups_of(module, recurse) for param in group.params)
    return [param for param in params if any(slot.module() in below for slot in param.slots)]


def _set(module: FSDPModule, recurse: bool = False, /, **settings: Any) -> None:
    for group in groups_of(module, recurse):
        group.change(**settings)


def _root_schedule(module: FSDPModule, method: str) -> Schedule:
    state = module._get_fsdp_state()
    if state.is_root is False:
        raise RuntimeError(f"{method} must be called on the root, '{state.fqn}' is below it; call it there")
    return state.schedule


def _prefetch_list(method: str, modules: Iterable[FSDPModule]) -> list[weakref.ReferenceType[FSDPState]]:
    expected = "expected a list of modules that fully_shard was called on; pass such modules, not their names"
    if isinstance(modules, str) or not isinstance(modules, Iterable):
        seen = repr(modules) if isinstance(modules, str) else f"a {type(modules).__name__}"
        raise TypeError(f"{method} got {seen}, {expected}")
    states = []
    for number, module in enumerate(modules):
        state = state_of(module) if isinstance(module, nn.Module) else None
        if state is None:
            seen = repr(module) if isinstance(module, str) else f"a {type(module).__name__}"
            raise ValueError(f"{method} got {seen} in place {number} of its list, {expected}")
        states.append(weakref.ref(state))
    return states


def _flag(name: str, value: object) -> bool:
    """A setting that is on or off; 0 and 1 and NumPy's bools are taken too."""
    if value not in (False, True):
        raise ValueError(f"{name}={value!r}, expected True or False; pass one of them")
    return bool(value)


def refuse_deepcopy(self: nn.Module, memo: Any) -> NoReturn:
    """`__deepcopy__` of sharded modules."""
    raise RuntimeError(
        f"a sharded {type(self).__name__} cannot be deep-copied: its copy would share process groups and hooks. Copy "
        "the model before fully_shard, or build it again and load this one's state_dict()"
    )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes `module.method_name` gather and reshard as `forward` does. No-op on a module that is not sharded.

    Raises:
        ValueError: if the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    bound = getattr(module, method_name, None)
    if not callable(bound):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r} to register; define it first")
    # A bound method would make the module hold itself. Any other callable is called as it is.
    own = isinstance(bound, types.MethodType) and bound.__self__ is module
    function: Callable[..., Any] = bound.__func__ if own else lambda _, *args, **kwargs: bound(*args, **kwargs)
    state, owner = module._get_fsdp_state(), weakref.ref(module)

    @functools.wraps(function if own else bound)
    @no_dynamo_frame
    def method(*args: Any, **kwargs: Any) -> Any:
        this = owner()
        assert this is not None
        output = None
        around, state.runs_method = state.runs_method, True
        try:
            args, kwargs = state.pre_forward(this, args, kwargs)
            output = function(this, *args, **kwargs)
        finally:
            state.runs_method = around
            output = state.post_forward(this, args, output)
        return output

    object.__setattr__(module, method_name, method)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Makes several roots (such as the pipeline stages of one rank) share lanes and reductions in flight.

    Call it before their first forward. No-op for fewer than two modules.
    """
    states = [module._get_fsdp_state() for module in modules]
    for state in states[1:]:
        state.schedule.context = states[0].schedule.context
