"""FullyShardedDataParallel: the module wrapper of FSDP1, sharded by core."""

from __future__ import annotations

import enum
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.core import CPUOffloadPolicy, OffloadPolicy, clip_grad_norm_, fully_shard
from shardkit.core.engine.order_check import OrderCheck
from shardkit.core.engine.root import initialise_root
from shardkit.core.engine.settings import Prefetch
from shardkit.core.engine.step import FSDPState, state_of
from shardkit.core.module import refuse_deepcopy
from shardkit.core.parameters.param import sharded_counterpart
from shardkit.legacy_fsdp_compat import api
from shardkit.legacy_fsdp_compat.api import *  # noqa: F403 - stock has these names here too
from shardkit.legacy_fsdp_compat.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, own
from shardkit.legacy_fsdp_compat.auto_wrap import auto_wrap
from shardkit.legacy_fsdp_compat.comm_hooks import install_hook
from shardkit.legacy_fsdp_compat.deferred_init import materialize_unit, own_modules, sync_from_first_rank
from shardkit.legacy_fsdp_compat.early_optimizers import adopt_early_optimizers
from shardkit.legacy_fsdp_compat.ignored import resolve_ignored
from shardkit.legacy_fsdp_compat.meshes import DeviceId, Placement, ProcessGroups, placement_for
from shardkit.legacy_fsdp_compat.mixed_precision import UnitPrecision, core_policy
from shardkit.legacy_fsdp_compat.optim_api import OptimizerStateApi
from shardkit.legacy_fsdp_compat.state_dict_hooks import register_state_dict_hooks
from shardkit.legacy_fsdp_compat.state_dict_types import StateDictApi
from shardkit.legacy_fsdp_compat.summon import SummonOptions, summoned
from shardkit.legacy_fsdp_compat.torch_compat import called_by_checkpoint, checkpoint_wrapped, detailed_debugging
from shardkit.legacy_fsdp_compat.units import WRAPPED, Unit, clean_name, label_alike
from shardkit.legacy_fsdp_compat.wrap import Policy

__all__ = ["FullyShardedDataParallel", "TrainingState"]
__all__ += api.__all__


class TrainingState(enum.Enum):
    """The current activity of an FSDP module."""

    IDLE = enum.auto()
    FORWARD_BACKWARD = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


def _is_wrapped(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _shown(name: str, clean: bool) -> str:
    return name.replace(f"{WRAPPED}.", "") if clean else name


def _groups_of(place: Placement, given: ProcessGroups | None) -> ProcessGroups | None:
    """The process groups for the modules that a policy wraps: those of a hybrid strategy are made once."""
    return (place.group, place.replicate_group) if place.replicate_group is not None else given


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP wraps a module, got {type(module).__name__}")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        warnings.warn(
            f"a {type(module).__name__} has no forward, so FSDP will not gather its parameters; wrap its modules",
            stacklevel=3,
        )


class FullyShardedDataParallel(StateDictApi, OptimizerStateApi, nn.Module):
    """Shards a module's parameters over data-parallel ranks: the API of stock FSDP1 on core's `fully_shard`.

    A wrapped module, with everything below it down to other FSDP modules, is one *unit*: its parameters are gathered
    together before its forward and backward, and freed afterwards. Parameters stay separate: outside forward, backward
    and `summon_full_params` each is a DTensor with this rank's rows, even with `use_orig_params=False`.

    Args:
        module: the module to wrap.
        process_group: the ranks to shard over, by default all; for hybrid strategies (shard group, replicate group).
        sharding_strategy: see `ShardingStrategy`; default FULL_SHARD.
        cpu_offload: `CPUOffload(offload_params=True)` keeps shards and gradients in host memory.
        auto_wrap_policy: which modules below become units of their own; see `wrap`.
        backward_prefetch: None disables gathering ahead, unless `forward_prefetch` enables it.
        mixed_precision: dtypes of computation, reduction and buffers; shards keep the original dtype.
        ignored_modules: modules to leave alone, with everything below them.
        param_init_fn: initialises a module whose parameters are on the meta device.
        device_id: the device to compute on; default: where the parameters are, else the accelerator, else the CPU.
        sync_module_states: copy rank 0's parameters and buffers to all ranks first.
        forward_prefetch: gather the next unit during forward.
        limit_all_gathers: accepted; gathers are always limited to the running unit and the next one.
        use_orig_params: FSDP1's flag. Parameters are always the original ones here; the flag decides the layout of
            LOCAL state dicts, and False asks for uniform `requires_grad` in each unit.
        ignored_states: like `ignored_modules`, or parameters.
        device_mesh: instead of `process_group`; 2-D (replicate, shard) for hybrid strategies. Sharded state dicts then
            hold DTensors.

    Raises:
        ValueError, TypeError, RuntimeError: for unusable arguments; the message says what was expected.

    Collective if it synchronises states or makes process groups; every rank must make the same calls.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., bool] | Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: DeviceId = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        _check_module(module)
        strategy = own(ShardingStrategy, sharding_strategy or ShardingStrategy.FULL_SHARD, "sharding_strategy")
        self.cpu_offload = own(CPUOffload, cpu_offload or CPUOffload(), "cpu_offload")
        self.mixed_precision = own(MixedPrecision, mixed_precision or MixedPrecision(), "mixed_precision")
        self.backward_prefetch = backward_prefetch and own(BackwardPrefetch, backward_prefetch, "backward_prefetch")
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self._use_orig_params = use_orig_params
        self._is_root: bool | None = None
        self._summoned = False
        self._summoner: tuple[FullyShardedDataParallel, ...] = ()
        self._backwards_seen = 0
        self._comm_hook: Callable[..., None] | None = None
        ignored = self._ignored = resolve_ignored(module, ignored_modules, ignored_states, _is_wrapped)
        place = self._placement = placement_for(
            module, process_group, strategy, device_id, device_mesh, auto_wrap_policy is not None
        )
        self.compute_device = place.device
        if auto_wrap_policy is not None:
            inner = {  # the arguments for each module that the policy wraps
                "device_mesh": device_mesh,
                "process_group": None if device_mesh is not None else _groups_of(place, process_group),
                "device_id": device_id,
                "sharding_strategy": strategy,
                "use_orig_params": use_orig_params,
                "ignored_states": ignored.parameters,
                "mixed_precision": None if mixed_precision is None else self.mixed_precision,
                "cpu_offload": self.cpu_offload,
                "param_init_fn": param_init_fn,
                "sync_module_states": sync_module_states,
                "backward_prefetch": self.backward_prefetch,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
            }
            wrapper = FullyShardedDataParallel
            auto_wrap(module, auto_wrap_policy, ignored.modules, ignored.parameters, inner, wrapper, _is_wrapped)
        materialize_unit(module, ignored, _is_wrapped, param_init_fn, place.device)
        if sync_module_states:
            groups_to_sync = [place.group, *([place.replicate_group] if place.replicate_group else [])]
            sync_from_first_rank(module, ignored, _is_wrapped, groups_to_sync, place.device)
        self._precision = UnitPrecision(module, self.mixed_precision, ignored, _is_wrapped)
        self._fsdp_wrapped_module = module
        self._originals = [
            weakref.ref(parameter)
            for parameter in module.parameters()
            if parameter not in ignored.parameters and sharded_counterpart(parameter) is None
        ]
        self._shard(place)
        if not use_orig_params:
            self._check_uniform_requires_grad()
        self.init_state_dict_type()
        register_state_dict_hooks(self)
        self.register_forward_pre_hook(FullyShardedDataParallel._before_forward, prepend=True)

    def _shard(self, place: Placement) -> None:
        offload = CPUOffloadPolicy() if self.cpu_offload.offload_params else OffloadPolicy()
        fully_shard(
            self,
            mesh=place.mesh,
            dp_mesh_dims=place.dims,
            reshard_after_forward=None if place.strategy.frees_after_forward else False,
            mp_policy=core_policy(self.mixed_precision),
            offload_policy=offload,
            ignored_params=self._ignored.parameters,
        )
        for group in self._state.groups:
            for param in group.params:
                param.fqn = clean_name(param.fqn)
        # It is not an instance of stock's FSDP2 class, and scripts check for the exact type.
        self.__class__ = FullyShardedDataParallel
        mine = {param for group in self._state.groups if len(group.users) == 1 for param in group.params}
        self._unit = Unit(
            self._fsdp_wrapped_module,
            place,
            self._use_orig_params,
            self.mixed_precision.param_dtype,
            lambda param: param in mine,
        )
        is_sharded = self.sharding_strategy is not ShardingStrategy.NO_SHARD
        self._precision.keep_low_precision_gradients(self._unit, is_sharded)

    def _check_uniform_requires_grad(self) -> None:
        frozen = [one.name for one in self._unit.parameters if not one.sharded.requires_grad]
        if frozen and len(frozen) < len(self._unit.parameters):
            trainable = [one.name for one in self._unit.parameters if one.sharded.requires_grad]
            raise ValueError(
                f"use_orig_params=False asks for uniform requires_grad in one FSDP module, but {frozen} are frozen and "
                f"{trainable} are not; wrap the frozen modules separately, or pass use_orig_params=True"
            )

    # -- what scripts read ---------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module; if that is an activation-checkpoint wrapper, the module inside."""
        return checkpoint_wrapped(self._fsdp_wrapped_module)

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded parameters of this unit, without those below other FSDP modules; in stock, the flat ones."""
        return [one.sharded for one in self._unit.parameters]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group for sharding; with NO_SHARD, for replication."""
        return self._unit.placement.group

    @property
    def rank(self) -> int:
        """This rank in `process_group`."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """Ranks in `process_group`."""
        return self.process_group.size()

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy that was passed, or NO_SHARD if the process group has one rank."""
        return self._unit.placement.strategy

    @property
    def training_state(self) -> TrainingState:
        """The current activity of this module."""
        if self._summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.FORWARD_BACKWARD if self._state.in_forward else TrainingState.IDLE

    @property
    def _state(self) -> FSDPState:
        state = state_of(self)
        assert state is not None
        return state

    def __getattr__(self, name: str) -> Any:
        """Takes attributes that this wrapper lacks from the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            if name in ("_flat_param", "_handle"):
                raise NoFlatParameterError(name) from None
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> Any:
        """An item of the wrapped module, for example of an `nn.Sequential`."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters, as in `named_modules()`; inside `summon_full_params` without the wrappers' name parts.

        Outside `summon_full_params` they are the sharded parameters, even while a unit is gathered.
        """
        clean = self._summoned or called_by_checkpoint()
        named = super().named_parameters(prefix, recurse, remove_duplicate)
        return ((_shown(name, clean), self._shown_parameter(parameter)) for name, parameter in named)

    def _shown_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        param = None if self._summoned else sharded_counterpart(parameter)
        return parameter if param is None else param.sharded_param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and buffers, with names as `named_parameters` has them."""
        clean = self._summoned or called_by_checkpoint()
        named = super().named_buffers(prefix, recurse, remove_duplicate)
        return ((_shown(name, clean), buffer) for name, buffer in named)

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint.state_dict: the attributes that appear in names of modules, but not in names
        of a state dict.
        """
        return {"": WRAPPED}

    def _buffer_names(self) -> list[str]:
        """Names of this unit's buffers, relative to the wrapped module."""
        return [
            clean_name(f"{prefix}.{name}" if prefix else name)
            for prefix, module in own_modules(self._fsdp_wrapped_module, self._ignored, _is_wrapped)
            for name in module._buffers
        ]

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The FSDP modules at and below `module`, outermost first; with `root_only`, only those inside no other."""
        found = [one for one in module.modules() if isinstance(one, FullyShardedDataParallel)]
        if not root_only:
            return found
        inner = {below for one in found for below in one.modules() if below is not one}
        return [one for one in found if one not in inner]

    def check_is_root(self) -> bool:
        """Whether this is the outermost FSDP module; decides it if it is not decided yet."""
        self._lazy_init()
        return bool(self._is_root)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _lazy_init(self) -> None:
        """Makes the first FSDP module that runs, or is asked, the root of those below it."""
        if self._is_root is not None:
            return
        if self._summoner:  # called by the wrapped module of an outer one, whose own forward has not run yet
            (outer,) = self._summoner
            outer._lazy_init()
            if outer._state.is_root is None:
                outer._claim()
            return
        below = self.fsdp_modules(self)
        for one in below:
            if one is not self and one._is_root:
                raise RuntimeError(
                    f"the FSDP module around {type(one.module).__name__} became a root before the one around "
                    f"{type(self.module).__name__} that contains it; run forward through the outermost one first"
                )
            one._is_root = one is self
        self._is_root = True
        if not self.forward_prefetch and self.backward_prefetch is None:
            self._state.schedule.set_prefetch(Prefetch(depth=0))

    def _before_forward(self, args: Any) -> None:
        self._lazy_init()
        if self._is_root:
            self._claim()
            for one in self.fsdp_modules(self):
                one._precision.enter(one._state, one.training)
        if torch.is_grad_enabled():
            self._reduce_unused()

    def _reduce_unused(self) -> None:
        """Gives zero gradients to parameters that backward did not reach: a flat parameter's is whole."""
        if self._is_root and self._backwards_seen != self._state.schedule.backwards:
            self._backwards_seen = self._state.schedule.backwards
            for one in self.fsdp_modules(self):
                for group in one._state.groups:
                    group.change(reduce_unused_params=False)
        for group in self._state.groups:
            group.change(reduce_unused_params=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward with this module's hooks. Inside `summon_full_params` the wrapped module runs without them: its
        parameters are whole, in their original dtype.
        """
        return self._fsdp_wrapped_module(*args, **kwargs) if self._summoned else super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module with gathered parameters and cast inputs."""
        args, kwargs = self._precision.cast_inputs(bool(self._is_root), args, kwargs)
        return self._fsdp_wrapped_module(*args, **kwargs)

    def _claim(self) -> None:
        """Makes this core's root: before its first forward, or after another root has used some of its units."""
        units = self.fsdp_modules(self)
        mine = self._state.schedule
        if self._state.is_root and all(one._state.schedule is mine for one in units):
            return
        for one in units:
            one._state.is_root = None
        initialise_root(self._state, same_names=False)
        if self._use_orig_params:
            adopt_early_optimizers([one._originals for one in units])
        if mine.order_check is None and detailed_debugging():
            mine.order_check = OrderCheck()
        for state in mine.all_states:
            state.fqn = clean_name(f"{state.fqn}.").removesuffix(".")
            for group in state.groups:
                group.label = clean_name(f"{group.label}.").removesuffix(".")
                for param in group.params:
                    param.fqn = clean_name(param.fqn)
        label_alike([group for state in mine.all_states for group in state.groups])

    # -- whole parameters ----------------------------------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Inside, the modules hold whole parameters in their original dtype (collective: every rank enters).

        Args:
            module: an FSDP module, or any module with FSDP modules below it.
            recurse: whether to include the FSDP modules below `module`.
            writeback: at the end, write each rank's rows of the modules' parameters to its shards.
            rank0_only: only the first rank of the process group gets whole parameters.
            offload_to_cpu: the whole parameters are CPU tensors.
            with_grads: include gradients, if there are any.

        Raises:
            NotImplementedError: for `writeback` with `rank0_only`, which would leave ranks different.
            AssertionError: inside forward, backward or another `summon_full_params`.
            RuntimeError: at the end, if the shape of a parameter was changed.
        """
        options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        chosen = FullyShardedDataParallel.fsdp_modules(module)
        if not recurse:
            chosen = [one for one in chosen if one is module]
        if any(one._summoned for one in chosen):
            raise AssertionError(
                "summon_full_params inside another summon_full_params of the same module; leave the outer one first"
            )
        with summoned([(one._unit, one._state) for one in chosen], options):
            below = [(one, outer) for outer in chosen for one in outer.fsdp_modules(outer) if one not in chosen]
            for one, outer in below:
                one._summoner = (outer,)
            for one in chosen:
                one._summoned = True
            try:
                yield
            finally:
                for one in chosen:
                    one._summoned = False
                for one, _ in below:
                    one._summoner = ()

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """`nn.Module.apply` on whole parameters, which are written back (collective)."""
        with self.summon_full_params(self, recurse=False):
            return super().apply(fn)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep whole gradients on each rank; the next one outside reduces them with its own.

        Raises:
            RuntimeError: on an FSDP module that is not the root.
        """
        self._require_root("no_sync")
        modules = self.fsdp_modules(self)
        for one in modules:
            one._set_gradient_sync(False)
        try:
            yield
        finally:
            for one in modules:
                one._set_gradient_sync(True)

    def _set_gradient_sync(self, sync: bool) -> None:
        for group in self._state.groups:
            group.change(reduce_grads=sync, all_reduce_grads=sync)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets all gradients, including those left by `no_sync` and those of currently gathered parameters."""
        super().zero_grad(set_to_none)
        for one in self.fsdp_modules(self):
            for group in one._state.groups:
                for param in group.params:
                    param.zero_grad(set_to_none)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Applies casts and moves (`to`, `half`, ...) to the sharded parameters, or the whole ones if summoned."""
        if not self._summoned:
            self._state.to_sharded()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        refuse_deepcopy(self, memo)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales gradients so that their total norm is at most `max_norm` (collective). Call it on the root.

        Returns:
            The norm before scaling, 0-dim, in the widest dtype of the gradients.

        Raises:
            RuntimeError: on an FSDP module that is not the root.
        """
        self._require_root("clip_grad_norm_")
        named = list(self.named_parameters())
        gradients = [parameter.grad for _, parameter in named if parameter.grad is not None]
        norm = clip_grad_norm_(named, max_norm, norm_type)
        if not gradients:
            warnings.warn(
                f"clip_grad_norm_ on rank {dist.get_rank()} found no gradients; the norm is that of the other ranks",
                stacklevel=2,
            )
            return norm
        return norm.to(functools.reduce(torch.promote_types, (gradient.dtype for gradient in gradients)))

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Reduces gradients with `hook` from now on. Call it on the root, once, before the first forward.

        Args:
            state: the hook's first argument.
            hook: `hook(state, gradient, output)` for sharded parameters: `gradient` is flat and padded, `world_size`
                times as long as `output`, which gets this rank's part. `hook(state, gradient)` with NO_SHARD, in place.
                It divides by the world size itself, as torch's `default_hooks` do.

        Raises:
            AssertionError: not on the root, for a second hook, or with a hybrid strategy.
            ValueError: if `hook` is not callable.
        """
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on the root FSDP module; call it there")
        if not callable(hook):
            raise ValueError(f"the communication hook must be a function, got {hook!r}")
        for one in self.fsdp_modules(self):
            if one.sharding_strategy.is_hybrid:
                raise AssertionError(
                    f"communication hooks are not supported with {one.sharding_strategy}; use another strategy"
                )
            if one._comm_hook is not None:
                raise AssertionError("a communication hook is already registered; register one only")
        for one in self.fsdp_modules(self):
            one._comm_hook = hook
            install_hook(one._state.groups, state, hook)

    def _require_root(self, method: str) -> None:
        if not self.check_is_root():
            raise RuntimeError(
                f"{method}() must be called on the root FSDP module, this one is below another; call it there"
            )


class NoFlatParameterError(NotImplementedError, AttributeError):
    """Raised on access to the flat parameter, which does not exist here; `hasattr` returns False."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no flat parameter here, so no '{name}': parameters stay separate DTensors. Read whole values "
            "inside FSDP.summon_full_params(module), this rank's rows with parameter.to_local(), and FSDP1's flat "
            "format with StateDictType.LOCAL_STATE_DICT"
        )
