"""One parameter: its sharded DTensor, its unsharded Parameter, and the module slots that it sits in.

Tensors of a parameter, in the order of its life:

    original        the user's nn.Parameter; read once, then only remembered (weakly)
    plain           the original itself, or the local tensor of one that is a DTensor already: what is cut and gathered
    sharded_param   nn.Parameter(DTensor) over this rank's chunk: what the optimizer and state dicts see
    shard           a LocalShard: that chunk in its memory, and how it is gathered
    flats           1-D tensors over the unsharded storage, world_size slots long: what the network writes
    unsharded_param nn.Parameter over the same storage, in the original's form: what forward and backward see
    accumulated     unsharded gradient of backwards without gradient sync, once cast to the dtype of sums; else in .grad
    partial         HSDP: sum over the shard group of backwards without all-reduce

Note [Storage that comes and goes]
unsharded_param is created once and lives as long as the parameter. Resharding resizes its storage to 0, unsharding
gives it memory again and fills it through `flats`, which are tensors of their own over that storage. So a tensor that
autograd saved in forward is valid again in backward, and no write bumps the version counter that autograd checks.

Note [Attributes of parameters]
A user may set attributes on a parameter, such as `no_weight_decay`, for an optimizer or a trainer to read. The sharded
parameter gets those of the original, and the unsharded one gets those of the sharded one. A wrapper subclass keeps its
inner tensors among the attributes; these are not copied, because computation would use them instead of the gathered
ones. A class that adds only Python to a tensor (methods, `__torch_function__`), such as a subclass of nn.Parameter, is
also the class of the unsharded parameter, because forward may depend on it.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils.weak import WeakTensorKeyDictionary

from shardkit.core import events
from shardkit.core.mesh import DataParallelMesh
from shardkit.core.parameters.gradients import MARK, Dtypes, hooked, refuse_gradient
from shardkit.core.parameters.placed import ReplicatedGradient
from shardkit.core.parameters.placements import layout_for, shard_of
from shardkit.core.parameters.subclass_gather import HOOK, SubclassGather
from shardkit.core.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardkit.core.runtime.plan import GatherItem
from shardkit.core.runtime.sharding import dense_strides
from shardkit.core.runtime.shared.segment import locate
from shardkit.core.stock_names import PARAM_NAMES, answers_stock_names
from shardkit.core.torch_compat import (
    PARAMETER_FLAG,
    has_gradient_hooks,
    is_plain,
    lies_like,
    like_dtensor,
    local_of,
    new_dtensor,
    post_accumulate_grad_hooks,
    put_engine_hook,
    replace_local,
    take_meaning,
    wraps_tensors,
)

# The parameter that an original or unsharded parameter belongs to. An attribute would be pickled and copied.
_became: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_OWNER = "_shardkit_param"  # on the storage of an unsharded parameter: a weak reference to its FSDPParam
# Sharded parameters, by id: `module.to()` cannot swap a DTensor that has weak references.
_sharded: weakref.WeakValueDictionary[int, FSDPParam] = weakref.WeakValueDictionary()


def param_over(storage: torch.UntypedStorage) -> FSDPParam | None:
    """The parameter whose unsharded form lies in `storage`, if resharding frees it."""
    param: FSDPParam | None = storage.__dict__.get(_OWNER, lambda: None)()
    if param is None or param.unsharded_param is None or param.shard.aliased or param.shard.subclass is not None:
        return None
    return param if param.unsharded_param.untyped_storage() is storage else None


def sharded_counterpart(parameter: torch.Tensor) -> FSDPParam | None:
    """The FSDPParam of an original, sharded or unsharded parameter, None if there is none (any more)."""
    param = _sharded.get(id(parameter))
    if param is not None and param.sharded_param is parameter:
        return param
    reference: Callable[[], FSDPParam | None] | None = _became.get(parameter)
    return None if reference is None else reference()


def fqn_of(parameter: torch.Tensor) -> str:
    """The FQN of a parameter of ours, for messages; '?' for any other tensor."""
    param = sharded_counterpart(parameter)
    return "?" if param is None else param.fqn


def _warn_of_direct(sharded: torch.Tensor) -> None:
    """A hook of sharded parameters: autograd reaches one only if the user has computed with it."""
    warnings.warn(
        f"backward reached the sharded parameter '{fqn_of(sharded)}' itself, which was used outside its module's "
        "forward, as by full_tensor(): its gradient there is that of this rank's loss alone, and right only if the "
        "loss is the same on all ranks, as a penalty on the weights is. Otherwise use the parameter in forward, or in "
        "a method of register_fsdp_forward_method",
        stacklevel=2,
    )


@dataclass(frozen=True)
class ParameterForm:
    """Connects a parameter to the plain tensor that is cut: adapters.py, Note [Forms]. This one has nothing to convert.

    `local` makes the local tensor of the sharded parameter, or of its gradient, over the memory of a shard; `shard` is
    its inverse. `unsharded` makes the tensor that the module computes with over the memory of the gathered plain one,
    and `gradient` the plain gradient from that tensor's; it may communicate over axes that are not data-parallel.

    Attributes:
        shape: shape of the whole parameter, as state dicts have it.
        mesh, placements: those of the sharded parameter.
        kind: its class.
        sums_elsewhere: whether `gradient` may have to sum over axes that are not data-parallel.
    """

    shape: torch.Size
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    kind: type[DTensor] = DTensor
    sums_elsewhere: bool = False

    def sharded(self, shard: torch.Tensor) -> DTensor:
        return new_dtensor(shard, self.mesh, self.placements, self.shape, kind=self.kind)

    def local(self, tensor: torch.Tensor, /) -> torch.Tensor:
        return tensor

    shard = unsharded = gradient = local


def user_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes of a parameter that its class did not set (see Note [Attributes of parameters])."""
    attributes = parameter.__dict__
    if not wraps_tensors(parameter):
        return dict(attributes)
    # A DTensor keeps its own attributes in slots; `detach` would cost an operator for each parameter.
    by_class = {PARAMETER_FLAG}
    if type(parameter) is not DTensor:
        with torch.inference_mode(False):  # in it detach() fails for tensors that were made outside
            by_class.update(parameter.detach().__dict__)
    return {name: value for name, value in attributes.items() if name not in by_class}


@dataclass(frozen=True)
class Slot:
    """A place where a module holds a parameter. The module is held weakly, because it owns this object."""

    module: weakref.ReferenceType[nn.Module]
    name: str
    plain: bool

    @staticmethod
    def of(module: nn.Module, name: str) -> Slot:
        """The slot `module.name`; modules that override __setattr__ (nn.LSTM and similar) are still notified."""
        plain = type(module).__setattr__ is nn.Module.__setattr__
        return Slot(weakref.ref(module), name, plain)

    def get(self) -> nn.Parameter | None:
        module = self.module()
        return None if module is None else module._parameters.get(self.name)

    def set(self, parameter: nn.Parameter) -> None:
        module = self.module()
        if module is None:
            return
        if self.plain:
            module._parameters[self.name] = parameter
        else:
            setattr(module, self.name, parameter)


@dataclass(frozen=True, eq=False)
class LocalShard:
    """This rank's part of a parameter; made anew when its memory or dtypes change.

    Attributes:
        local_tensor: that of the sharded parameter.
        tensor: the plain tensor over the same memory that is gathered.
        subclass: how a tensor subclass gathers itself; None for any other.
        aliased: nothing is gathered, as at world size 1: this memory is the unsharded parameter's.
    """

    local_tensor: torch.Tensor
    tensor: torch.Tensor
    subclass: SubclassGather | None
    aliased: bool


@answers_stock_names(PARAM_NAMES)
class FSDPParam:
    """One parameter of a group, sharded on one dim over the shard axis of a data-parallel mesh.

    `fqn` is refined when the root module is known. `slots` are all module attributes that hold the parameter. A
    `placement` of None replicates it, as every 0-dim one. `device` is that of the unsharded parameter.
    """

    replaced = 0  # how often a sharded parameter of the process was: optimizers may hold the one before

    def __init__(
        self,
        original: nn.Parameter,
        fqn: str,
        slots: list[Slot],
        mesh: DataParallelMesh,
        placement: Placement | None,
        form: ParameterForm,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self.fqn = fqn
        self.slots = slots
        self.group: weakref.ReferenceType[object] | None = None
        self.mesh = mesh
        self.device = device
        self.offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
        self.pinned = self.offload is not None and self.offload.pin_memory and device.type != "cpu"
        self.form = form
        plain = original.detach()
        if isinstance(original, DTensor):
            plain = local_of(plain)
        self.shape = plain.shape
        self.placement = placement
        self.layout = layout_for(placement, tuple(self.shape), mesh.shard_size)
        self.local_shape = self.layout.local_shape(mesh.shard_rank) if self.shape else ()
        home = device if self.offload is None else torch.device("cpu")
        shard = shard_of(plain, self.layout, mesh.shard_rank, home)
        self.sharded_param = nn.Parameter(form.sharded(shard), requires_grad=original.requires_grad)
        self.sharded_param.__dict__.update(user_attributes(original))
        self.dtypes = Dtypes(mp_policy.for_parameter(original, fqn)).decided(original, shard.dtype)
        self.dtypes.put_on(self.sharded_param)
        self.may_defer = False  # whether sums are wider than the computation, so that their cast can be deferred
        # Of the unsharded parameter, unless a hook chooses: Note [Attributes of parameters].
        keeps_class = type(original) is not torch.Tensor and not wraps_tensors(original)
        self._unsharded_class: type[torch.Tensor] = type(original) if keeps_class else nn.Parameter
        _became[original] = weakref.ref(self)
        _sharded[id(self.sharded_param)] = self
        self.flats: list[torch.Tensor] = []
        self.unsharded_param: nn.Parameter | None = None
        self.unsharded_storage: torch.UntypedStorage | None = None  # that it was made over; None for a DTensor
        self.accumulated: torch.Tensor | None = None
        self.partial: torch.Tensor | None = None
        self.required_grad = original.requires_grad  # of both, when one was last registered in place of the other
        self.shard: LocalShard
        self.sharded_param.untyped_storage().__dict__[MARK] = id(self.sharded_param)
        self.adopt_shard(local_of(self.sharded_param))
        self.register(self.sharded_param)

    # -- changes by the user: registration.py, Note [One sweep] --------------------------------------------------------

    def adopt_parameter(self, parameter: nn.Parameter, *, loading: bool) -> None:
        """Takes another DTensor like the sharded parameter for it; `adopt_shard` must follow for the shard in it.

        One that is loaded brings values, and not its `grad_dtype` in the place of one that the user has set.
        """
        FSDPParam.replaced += 1
        take_meaning(cast(DTensor, parameter), cast(DTensor, self.sharded_param))
        _became[self.sharded_param] = weakref.ref(self)  # an optimizer may hold it still
        _became.pop(parameter, None)  # where one that was replaced comes back
        if not (loading and self.dtypes.chosen):
            self._decide_dtypes(parameter)
        self.dtypes.put_on(parameter)
        self.sharded_param = parameter
        if self.unsharded_param is not None:
            self.unsharded_param.__dict__.update(user_attributes(parameter))
        _sharded[id(parameter)] = self
        self.register(parameter)

    def adopt_shard(self, local: torch.Tensor) -> None:
        """Adopts a shard in other memory or of another dtype.

        The unsharded parameter is kept if it would be made the same way again: the graph of a forward may read it.
        """
        before = self._unsharded_kind if self.unsharded_param is not None else None
        if tuple(local.shape) != tuple(self.local_shape):
            raise ValueError(
                f"parameter '{self.fqn}' has a local shard of shape {tuple(local.shape)} on this rank; expected "
                f"{tuple(self.local_shape)}, the chunk of {tuple(self.shape)} that rank {self.mesh.shard_rank} of "
                f"{self.mesh.shard_size} holds; assign a tensor of this shape"
            )
        if self.partial is not None and local.dtype != (dtype := self.shard.tensor.dtype):
            self.refuse_pending(f"'{self.fqn}' was cast from {dtype} to {local.dtype}")  # divided at other times
        if is_plain(local):  # as fully_shard makes them: kernels of fused optimizers take no other strides than theirs
            local = local.contiguous()  # `place_shards` pins it
        elif self.pinned and local.device.type == "cpu" and not local.is_pinned():
            local = local.pin_memory()
        local = self.form.local(local)
        if local is not local_of(self.sharded_param):
            replace_local(self.sharded_param, local)
        tensor = self.form.shard(local)
        dtypes = self.dtypes = self.dtypes.decided(self.sharded_param, tensor.dtype)
        subclass: SubclassGather | None = None
        if HOOK in tensor.__dict__ or (not is_plain(tensor) and hasattr(tensor, HOOK)):
            subclass = SubclassGather(self.fqn, self.mesh.shard_mesh, self.shape, self.layout, dtypes.policy)
        aliased = (
            self.mesh.shard_size == 1
            and subclass is None
            and dtypes.compute == tensor.dtype
            and tensor.device == self.device
            and tensor.is_contiguous()
        )
        self.shard = LocalShard(local, tensor, subclass, aliased)
        if self.flats or self.unsharded_param is not None:
            self.free()
            unsharded, kept = self.unsharded_param, before == self._unsharded_kind and subclass is None
            if unsharded is None or not kept or (aliased and isinstance(unsharded, DTensor)):
                self._drop_unsharded()
            elif aliased:
                unsharded.data = tensor.view(self.shape)
                self.unsharded_storage = unsharded.untyped_storage()
        self.watch_direct_gradients()
        if self.accumulated is not None:
            self.accumulated = self.accumulated.to(self.dtypes.sums or self.dtypes.compute)  # as later gradients

    def watch_direct_gradients(self) -> None:
        """Makes a backward warn that reaches the sharded parameter itself: no other rank's gradient is added."""
        if self.mesh.size > 1 and self.sharded_param.requires_grad:
            put_engine_hook(self.sharded_param, _warn_of_direct)

    def _drop_unsharded(self) -> None:
        """Makes the next gather create a new one. A waiting gradient is kept; a later one is refused."""
        self.flats = []
        self.unsharded_storage = None
        unsharded, self.unsharded_param = self.unsharded_param, None
        if unsharded is None:
            return
        if unsharded.grad is not None:
            self.accumulated = unsharded.grad if self.accumulated is None else self.accumulated + unsharded.grad
        if unsharded.requires_grad:
            unsharded.register_hook(partial(refuse_gradient, self.fqn))

    @property
    def _unsharded_kind(self) -> tuple[object, ...]:
        """The properties that determine how the unsharded parameter is made, and its gradients."""
        return self.dtypes.compute, self.dtypes.sums, self.shard.aliased, self.shard.subclass is None

    @property
    def shard_to_share(self) -> torch.Tensor | None:
        """The shard, if it could be moved to memory that peers on this host can read, and is not there yet."""
        shard = self.shard.tensor
        if type(shard) is not torch.Tensor or shard.device.type != "cpu" or not shard.numel() or locate(shard):
            return None
        return None if self.shard.aliased or self.shard.subclass else shard

    def move_shard(self, shard: torch.Tensor) -> None:
        """Moves the shard to other memory with the same contents. Tensors over the old memory are detached from it."""
        self.shard = replace(self.shard, local_tensor=self.form.local(shard), tensor=shard)
        replace_local(self.sharded_param, self.shard.local_tensor)

    def set_mixed_precision(self, policy: MixedPrecisionPolicy) -> None:
        """Sets other dtypes for computation and reduction; gradients that wait for a reduction are kept."""
        self.dtypes = replace(self.dtypes, policy=policy.for_parameter(self.sharded_param, self.fqn))
        self.adopt_shard(self.shard.local_tensor)

    def check_ready(self) -> None:
        """Before the first gather: raises RuntimeError if the shard is on the wrong device."""
        self._decide_dtypes(self.sharded_param)
        seen, offloaded = self.shard.tensor.device, self.offload is not None
        expected = "cpu" if offloaded else self.device.type
        if seen.type == "meta":
            raise RuntimeError(
                f"parameter '{self.fqn}' is still on the meta device; call shardkit.core.materialize(model), or "
                "model.to_empty(device=...) followed by your initialisation or a load, before the first forward"
            )
        if seen.type != expected:
            raise RuntimeError(
                f"parameter '{self.fqn}' is on {seen}, expected a {expected} device "
                + ("because of CPUOffloadPolicy" if offloaded else f"because the mesh is on {self.device.type}")
                + f"; move the model with model.to('{expected}')"
            )

    # -- unsharding ----------------------------------------------------------------------------------------------------

    def sources(self) -> list[torch.Tensor]:
        """This rank's tensors to gather: the shard, or the tensors that a subclass makes from it."""
        shard, tensor = self.shard, self.shard.tensor
        if shard.aliased:
            return []
        if shard.subclass is None:
            return [tensor if self.shape else tensor.view(1)]
        module = self.slots[0].module()
        assert module is not None
        tensor = tensor if tensor.device == self.device else tensor.to(self.device, non_blocking=True)
        return shard.subclass.inputs(tensor, module)

    def items(self, sources: list[torch.Tensor]) -> list[GatherItem]:
        """The items of this parameter in a gather over the whole shard group; none if it is aliased."""
        if self.shard.aliased:
            return []
        if self.shard.subclass is None:
            return [GatherItem(self.fqn, self.layout, self.dtypes.compute)]
        layouts = zip(self.shard.subclass.layouts, sources, strict=True)
        return [GatherItem(self.fqn, layout, one.dtype, compressible=False) for layout, one in layouts]

    def allocate(self, items: list[GatherItem]) -> list[torch.Tensor]:
        """Gives the unsharded storage memory (see Note [Storage that comes and goes]); returns what to gather into."""
        subclass = self.shard.subclass
        if not self.flats and items:
            self.flats = [_flat_without_memory(item.layout.flat_numel, item.dtype, self.device) for item in items]
        if subclass is not None:
            # A hook may send more or less than before. Its tensors over a flat stay over the same memory.
            for index, item in enumerate(items):
                if self.flats[index].numel() < item.layout.flat_numel:
                    with outside_inference():
                        self.flats[index] = _dense_view(self.flats[index], torch.Size((item.layout.flat_numel,)))
                    self.flats[index].untyped_storage().resize_(0)  # `_dense_view` has given it memory
        memory = [(flat, flat.nbytes) for flat in self.flats]
        if subclass is not None and self.unsharded_param is not None:
            memory += zip(subclass.inner, subclass.inner_bytes, strict=True)  # those over flats have it then
        for tensor, nbytes in memory:
            storage = tensor.untyped_storage()
            if nbytes and not storage.nbytes():
                storage.resize_(nbytes)
                if events.hub.active:
                    events.emit(events.StorageAllocated(self.fqn, nbytes, "unsharded"))
        if subclass is None or not items:
            return self.flats
        return [flat[: item.layout.flat_numel] for flat, item in zip(self.flats, items, strict=True)]

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded storage when it has memory; an estimate until a tensor subclass was gathered once."""
        if self.shard.aliased:
            return 0
        if self.flats and (subclass := self.shard.subclass) is not None:
            return sum(flat.nbytes for flat in self.flats) + subclass.own_bytes
        return self.layout.flat_numel * self.dtypes.compute.itemsize

    def make_unsharded(self) -> nn.Parameter:
        """The parameter over the gathered memory; a subclass's parameter may be kept, with inner tensors refilled."""
        tensor: torch.Tensor | None = None
        shard, subclass = self.shard.tensor, self.shard.subclass
        if subclass is not None:
            # Views with version counters of their own, because the next gather writes to the flats; and the parameter
            # itself, as the hook may put new metadata, such as a scale, on the object.
            numels = [layout.flat_numel for layout in subclass.layouts]
            gathered = [_dense_view(flat, torch.Size([n])) for flat, n in zip(self.flats, numels, strict=True)]
            tensor = subclass.unsharded(shard, gathered, self.dtypes.compute, self.unsharded_param)
            if tensor is None:
                assert self.unsharded_param is not None
                return self.unsharded_param
            if tensor.shape != self.shape:  # stacked on dim 0, or padded
                dim, chunk = self.layout.dim, self.layout.padded_local_shape
                padded = (*chunk[:dim], self.layout.world_size * chunk[dim], *chunk[dim + 1 :])
                tensor = tensor.as_strided(self.shape, dense_strides(padded))
        with outside_inference():
            if tensor is None:
                tensor = shard if self.shard.aliased else _dense_view(self.flats[0], self.shape)
                tensor = tensor if tensor.shape == self.shape else tensor.view(self.shape)
            cls = self._unsharded_class if subclass is None else nn.Parameter
            tensor, requires_grad = self.form.unsharded(tensor), self.sharded_param.requires_grad
            if issubclass(cls, nn.Parameter):  # without its constructor, which may take other arguments
                unsharded = nn.Parameter.__new__(cls, tensor, requires_grad)
            else:
                unsharded = nn.Parameter(tensor.as_subclass(cls), requires_grad)
        unsharded.__dict__.update(user_attributes(self.sharded_param))
        self.may_defer = self.dtypes.prepare(unsharded, sums_elsewhere=self.form.sums_elsewhere)
        _became[unsharded] = weakref.ref(self)
        self.unsharded_param = unsharded
        storage = unsharded.untyped_storage()
        storage.__dict__[_OWNER] = weakref.ref(self)
        self.unsharded_storage = None if isinstance(unsharded, DTensor) else storage
        return unsharded

    def register(self, parameter: nn.Parameter) -> None:
        for slot in self.slots:
            slot.set(parameter)

    @property
    def memory(self) -> set[int]:
        """Addresses of the unsharded parameter."""
        tensors = [self.shard.tensor] if self.shard.aliased else self.flats
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def free(self) -> None:
        """Frees the unsharded storage; tensors over it remain."""
        subclass = self.shard.subclass
        for tensor in self.flats if subclass is None else (*self.flats, *subclass.inner):
            storage = tensor.untyped_storage()
            if (nbytes := storage.nbytes()) == 0:
                continue
            try:
                storage.resize_(0)
            except RuntimeError as error:
                raise RuntimeError(
                    f"the memory of parameter '{self.fqn}' cannot be freed: {error}. Something else holds it, such as "
                    "a numpy array that was made of the parameter in forward; make it of a clone"
                ) from error
            if events.hub.active:
                events.emit(events.StorageFreed(self.fqn, nbytes, "unsharded"))

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _decide_dtypes(self, parameter: torch.Tensor) -> None:
        self.dtypes = self.dtypes.decided(parameter, self.shard.tensor.dtype)

    def set_gradient_aside(self) -> torch.Tensor | None:
        """Before a cast or move of the module: takes away a gradient whose dtype must not follow the parameter's."""
        self._decide_dtypes(self.sharded_param)
        gradient = self.sharded_param.grad if self.dtypes.chosen else None
        if gradient is not None:
            self.sharded_param.grad = None
        return gradient

    def put_gradient_back(self, gradient: torch.Tensor | None) -> None:
        """After a cast or move: restores `grad_dtype`, and that gradient, moved along."""
        self.dtypes.put_on(self.sharded_param)
        if gradient is not None:
            self.sharded_param.grad = gradient.to(self.sharded_param.device)

    def defer_cast(self, *, will_reduce: bool) -> None:
        """At the start of a backward, if `may_defer`: autograd leaves the cast to wider sums to the reduction.

        A first gradient that is not reduced must be cast at once: autograd then adds the contributions of several uses.
        """
        unsharded = self.unsharded_param
        if unsharded is not None and (will_reduce or self.accumulated is not None or unsharded.grad is not None):
            unsharded.grad_dtype = None

    def end_deferring(self) -> None:
        """After its gradients have been taken: ends `defer_cast`."""
        unsharded, sums = self.unsharded_param, self.dtypes.sums
        if unsharded is not None and (unsharded.grad is None or unsharded.grad.dtype == sums):
            unsharded.grad_dtype = sums

    def accumulate_unsharded(self) -> None:
        """Keeps the gradient of a backward without sync in the dtype of sums, until it is reduced."""
        if (parameter := self.unsharded_param) is None or parameter.grad is None:
            return
        if self.accumulated is not None:
            self.accumulated += parameter.grad
            parameter.grad = None
        elif (dtype := self.dtypes.sums) is not None and dtype != parameter.grad.dtype:
            self.accumulated = parameter.grad.to(dtype)
            parameter.grad = None

    @property
    def pending(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Between backwards: the unsharded gradient and HSDP's sum over the shard group that have yet to be reduced."""
        unreduced = self.accumulated
        if unreduced is None and self.unsharded_param is not None:
            unreduced = self.unsharded_param.grad
        return unreduced, None if self.partial is None else self.partial.view(self.local_shape)

    def refuse_pending(self, what: str) -> None:
        """Raises RuntimeError if a gradient has yet to be reduced while `what` is being done."""
        unreduced, partial = self.pending
        if unreduced is not None or partial is not None:
            raise RuntimeError(
                f"{what}, but a gradient of parameter '{self.fqn}' waits for "
                + ("its reduction" if unreduced is not None else "HSDP's all-reduce")
                + "; call synchronize_gradients() of the sharded module, which reduces it, or zero_grad() of that "
                "module, which drops it"
            )

    def take_gradient(self, zeros_if_unused: bool, all_reduces: bool, alike: bool) -> torch.Tensor | None:
        """The plain full gradient to reduce, which this object then drops; None if backward left none.

        Zeros if it left none and a partial sum is to be all-reduced now, also if the parameter was frozen meanwhile.
        `alike`: in the dtype of sums, where some were accumulated.
        """
        parameter, gradient = self.unsharded_param, None
        if parameter is not None:
            gradient, parameter.grad = parameter.grad, None
        waits = self.partial is not None and all_reduces
        if self.accumulated is not None:
            fresh, gradient, self.accumulated = gradient, self.accumulated, None
            if fresh is not None:
                gradient += fresh
        elif zeros_if_unused or waits:  # ranks send zeros or gradients, of the dtype that autograd leaves
            asked = self.dtypes.sums if parameter is None or alike else parameter.grad_dtype
            dtype = self.dtypes.compute if asked is None or (self.may_defer and not alike) else asked
            if gradient is not None:
                gradient = gradient.to(dtype)
            elif waits or (parameter is not None and parameter.requires_grad):
                return torch.zeros(self.layout.shape, dtype=dtype, device=self.device)
        if gradient is None:
            return None
        gradient = self.form.gradient(gradient)
        return gradient if gradient.shape == self.layout.shape else gradient.reshape(self.layout.shape)

    def deliver(self, gradient: torch.Tensor) -> bool:
        """Makes a reduced shard the sharded gradient, in its dtype, or adds it to the existing one.

        Copies to pinned memory overlap, unless host code reads them at once; the end of backward waits for them.

        Returns:
            Whether the user's hooks have run: a step of theirs on local tensors bumps no version counter of a DTensor.
        """
        sharded: Any = self.sharded_param
        existing, with_hooks = sharded.grad, has_gradient_hooks(sharded)
        if (dtype := self.dtypes.delivered) is not None and gradient.dtype != dtype:
            gradient = gradient.to(dtype)
        gradient = gradient if gradient.shape == self.local_shape else gradient.view(self.local_shape)
        if self.offload is not None and gradient.device.type != "cpu":
            overlap = self.pinned and existing is None and not with_hooks
            target = torch.empty(self.local_shape, dtype=gradient.dtype, device="cpu", pin_memory=self.pinned)
            gradient = target.copy_(gradient, non_blocking=overlap)
        if with_hooks:
            summed = like_dtensor(self.form.local(gradient), sharded)
            gradient = self.form.shard(local_of(hooked(self.fqn, summed, sharded)))
        if existing is None:
            kind = ReplicatedGradient if self.placement is None else None
            made = like_dtensor(self.form.local(gradient), sharded, kind)
            made.__dict__[MARK] = made.untyped_storage().__dict__[MARK] = id(made)
            sharded.grad = made
        elif not lies_like(existing, sharded):
            at = getattr(existing, "placements", "no placements")
            raise RuntimeError(
                f"parameter '{self.fqn}' was assigned a gradient with {at}, and a reduced one with "
                f"{tuple(sharded.placements)} cannot be added to it; assign a DTensor like the parameter"
            )
        else:
            local_of(existing).add_(gradient)
        for hook in post_accumulate_grad_hooks(sharded) if with_hooks else ():
            hook(sharded)
        return with_hooks

    def zero_grad(self, set_to_none: bool) -> None:
        self.forget_gradients()
        if set_to_none:
            self.sharded_param.grad = None
        elif self.sharded_param.grad is not None:
            local_of(self.sharded_param.grad).zero_()

    def forget_gradients(self) -> None:
        self.accumulated = self.partial = None
        if self.unsharded_param is not None:
            self.unsharded_param.grad = None


# -- storage ----------------------------------------------------------------------------------------------------------

_NOTHING_TO_LEAVE = contextlib.nullcontext()


def outside_inference() -> contextlib.AbstractContextManager[None]:
    """Leaves inference mode: a first gather in it must not leave tensors that training cannot use.

    A step calls this for each parameter, and entering torch's context costs more than making a tensor.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING_TO_LEAVE


def _flat_without_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 1-D tensor of `numel` elements whose storage is not allocated yet."""
    with outside_inference():
        flat = torch.empty(numel, dtype=dtype, device=device)
        flat.untyped_storage().resize_(0)
    return flat


def _dense_view(flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A dense tensor of `shape` over the beginning of the storage of ``flat``, of the same dtype.

    Its version counter is a separate one, at 0 (`.data`; `set_` counts as a write): autograd does not mistake a gather
    for a user's in-place change. It stays valid when the storage is freed and allocated again.
    """
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), 0, shape, dense_strides(shape)).data
