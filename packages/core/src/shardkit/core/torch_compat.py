"""All private names of torch, and names that differ between its versions; checked on torch 2.13.

The rest of the package uses only torch's public names. Each function here documents what it replaces.
"""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed.checkpoint.state_dict as dcp_state_dict
import torch.distributed.fsdp as stock_fsdp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, Work, _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.checkpoint.filesystem import _StorageInfo as CheckpointStorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as StockCPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as StockFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as StockMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as StockOffloadPolicy
from torch.distributed.fsdp import UnshardHandle as StockUnshardHandle
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

# Names that come from torch as they are.
__all__ = [
    "CheckpointStorageInfo",
    "StockCPUOffloadPolicy",
    "StockFSDPModule",
    "StockMixedPrecisionPolicy",
    "StockOffloadPolicy",
    "StockUnshardHandle",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
]

_F = TypeVar("_F", bound=Callable[..., Any])

# The class was added in 2.12; nothing is an instance of ().
StockDataParallelMeshDims: Any = getattr(stock_fsdp, "DataParallelMeshDims", ())

STOCK_FUNCTIONS: dict[str, Any] = {
    name: getattr(stock_fsdp, name) for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
}
"""Stock's own functions, whatever `shardkit.core.install` puts in their places later."""

_STOCK_FSDP1 = stock_fsdp.FullyShardedDataParallel  # here too: `install` may put ours in its place
_STOCK_PARTS = "torch.distributed.fsdp._fully_shard"

# The class was added in 2.15, together with stock's rule for `reduce_dtype=None` (gradients.py).
StockGradientReductionHandle: Any = getattr(stock_fsdp, "GradientReductionHandle", object)
GRAD_DTYPE_DECIDES = StockGradientReductionHandle is not object
"""Whether stock sums gradients in the parameters' `grad_dtype` where `reduce_dtype` is None."""
RESET_DROPS_GRADIENTS = GRAD_DTYPE_DECIDES
"""Whether stock's `reset_iter_state` drops sharded gradients, too."""

RUNS_SUBCLASSES = torch.__version__ >= (2, 12)  # type: ignore[operator]  # torch declares a str
"""Whether torch calls the `__torch_dispatch__` of a subclass of DTensor; 2.11 runs its own operators in its place."""

PARAMETER_FLAG = "_is_param"
"""The attribute by which a tensor of a class of its own is a parameter: nn.Parameter puts it there."""


def no_dynamo(function: _F) -> _F:
    """Makes dynamo skip a function and everything it calls; a compiled caller has a graph break there.

    `torch._dynamo.disable` does this with a frame around the function, for which `import shardkit.core` would have to
    import dynamo. A frame of our own that imports it later would be seen by dynamo: around a module's hook it would be
    a graph break, and an error with `fullgraph=True`.
    """
    _run_as_it_is(function, recursive=True)
    # Attributes that dynamo checks before it inlines a function into a compiled frame.
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="it gathers or frees parameters")
    return function


def no_dynamo_frame(function: _F) -> _F:
    """Makes dynamo skip the frame of a function, but not the functions it calls."""
    _run_as_it_is(function, recursive=False)
    return function


def _run_as_it_is(function: Callable[..., Any], *, recursive: bool) -> None:
    frames = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    strategy = frames._FrameExecStrategy(skip, skip if recursive else default)
    frames.set_code_exec_strategy(function.__code__, strategy)


transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func`, such as grad, jvp or vmap, is running on this thread."""


def outside_transforms(function: _F) -> _F:
    """Makes a function run as if no transform of `torch.func` was active, on tensors that none has wrapped.

    `spmd_types` does not check types in it: shards, and parts of a packed buffer, have none.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if (spmd := sys.modules.get("spmd_types")) is not None and spmd.is_type_checking():
            with spmd.no_typecheck():
                return wrapper(*args, **kwargs)
        if not transforms_active():
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return cast(_F, wrapper)


local_of: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")
"""`DTensor.to_local()` without the autograd function that it goes through."""
held_local: Callable[[torch.Tensor], torch.Tensor] = vars(DTensor)["_local_tensor"].__get__
"""`local_of` for an object that only asks which tensor it is: it does not wait for a step that writes to it."""
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""`torch.set_grad_enabled` without the object that it makes for use as a context manager."""


def new_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    left_to_right: bool = False,
    kind: type[DTensor] = DTensor,
) -> DTensor:
    """A DTensor over `local` whose global shape is `shape`, contiguous; no communication and no autograd.

    `local` stays on its device. `DTensor.from_local` would move it to the mesh's, which would undo CPU offloading.

    torch reads a strided placement as an order of cuts, like stock fully_shard with tensor parallelism: the axes after
    it have cut first. With `left_to_right`, strided placements cut where they stand. `kind` is the class, for
    placements that torch's operators do not know.
    """
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(shape, stride, local.dtype)
    as_order = False if left_to_right else None  # None: if any placement is strided
    spec = DTensorSpec(mesh, tuple(placements), meta, use_strided_shard_as_shard_order=as_order)
    return kind.__new__(kind, local.detach(), spec, requires_grad=False)


def like_dtensor(local: torch.Tensor, like: torch.Tensor, kind: type[DTensor] | None = None) -> DTensor:
    """A DTensor over `local` with the mesh, placements, their meaning, and global shape of `like`.

    `kind` is its class, by default that of `like`. `DTensor.from_local` costs 50 times more. `__new__` sets everything;
    `__init__` would cost twice as much again and do nothing.
    """
    spec: DTensorSpec = like._spec  # type: ignore[attr-defined]
    made: type[DTensor] = kind or type(like)  # type: ignore[assignment]
    meta = spec.tensor_meta
    if meta is None or meta.dtype == local.dtype:
        return made.__new__(made, local, spec, requires_grad=False)
    as_order = spec.use_strided_shard_as_shard_order
    return new_dtensor(local, spec.mesh, spec.placements, meta.shape, left_to_right=not as_order, kind=made)


def lies_like(tensor: torch.Tensor, dtensor: DTensor) -> bool:
    """Whether a tensor is a DTensor with the placements of another one."""
    if not isinstance(tensor, DTensor):
        return False
    return tensor._spec is dtensor._spec or tuple(tensor.placements) == tuple(dtensor.placements)


def take_meaning(dtensor: DTensor, of: DTensor) -> None:
    """Gives a DTensor the meaning of another's placements (see `new_dtensor`); ranks and placements must be equal."""
    dtensor._spec = like_dtensor(local_of(dtensor), of)._spec


def flattened_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The 1-D mesh over the named axes of `mesh`, flattened into one if there are several (collective)."""
    if len(names) == 1:
        return mesh[names[0]]
    return mesh[names]._flatten("_".join(names))


def joined_mesh(replicate: DeviceMesh, shard: DeviceMesh) -> DeviceMesh:
    """The 2-D mesh of two 1-D meshes of one root, replicate axis first."""
    return DeviceMesh._concatenate([replicate, shard])


def post_accumulate_grad_hooks(parameter: torch.Tensor) -> Iterable[Callable[[torch.Tensor], None]]:
    """The hooks that users' calls of `register_post_accumulate_grad_hook` put on a parameter."""
    hooks = parameter._post_accumulate_grad_hooks
    return [hook for key, hook in hooks.items() if key != _OF_ENGINE] if hooks else ()


def put_engine_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Puts a hook on a parameter that autograd runs when it accumulates there, and that counts as no user's."""
    hooks = parameter._post_accumulate_grad_hooks or OrderedDict()
    hooks[_OF_ENGINE] = hook
    parameter._post_accumulate_grad_hooks = hooks  # autograd has lost them where `module.to()` has swapped contents


_OF_ENGINE = -1  # a key that no hook of a user has


def gradient_hooks(tensor: torch.Tensor) -> Iterable[Callable[[torch.Tensor], Any]]:
    """The hooks that `register_hook` put on a tensor."""
    hooks: dict[int, Any] | None = tensor._backward_hooks
    return tuple(hooks.values()) if hooks else ()


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has users' hooks of either kind."""
    if tensor._backward_hooks:
        return True
    hooks = tensor._post_accumulate_grad_hooks
    return bool(hooks) and len(hooks) > (_OF_ENGINE in hooks)


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Autograd's number of the backward that this thread is running (an inner one has its own), -1 if it runs none."""


def in_backward() -> bool:
    """Whether this thread is running a backward."""
    return current_backward() != -1


def top_saved_tensors_hooks() -> Any:
    """The pack and unpack hooks that `saved_tensors_hooks` has put in force for this thread, None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


queue_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Runs a function when the backward that is running now has ended."""


next_autograd_node: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The sequence number that autograd gives the next node of this thread; nodes run backward in falling order."""


def made_since(tensor: torch.Tensor, number: int) -> bool:
    """Whether the autograd node of `tensor` was made when `next_autograd_node` was `number`, or later."""
    try:
        node = tensor.grad_fn
    except RuntimeError:  # a view of several, whose base was written to in place: autograd cannot use it either
        return False
    return node is not None and int(node._sequence_nr()) >= number


@no_dynamo
def hook_innermost(
    optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., None]
) -> list[RemovableHandle]:
    """Registers step hooks that run after all other current pre-hooks, and before all other current post-hooks."""
    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    hooks = cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)
    hooks.move_to_end(handles[1].id, last=False)
    return handles


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """The step of an optimizer's class without the wrapper that calls hooks."""
    step: Any = type(optimizer).step
    while step.__code__ is _STEP:
        step = step.__wrapped__
    return cast(Callable[[torch.optim.Optimizer], object], step)


def is_within_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step whose hook calls this runs within another step of the same optimizer."""
    return sum(one.f_code is _STEP and one.f_locals.get("self") is optimizer for one in _callers()) > 1


def is_gathered_by_torch() -> bool:
    """Whether torch's `get_optimizer_state_dict` with `full_state_dict=True` requests a state dict."""
    return any(one.f_code is _GET_STATE and one.f_locals["info"].full_state_dict for one in _callers())


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


_GET_STATE = inspect.unwrap(dcp_state_dict._get_optim_state_dict).__code__

# The wrapper that torch puts around the `step` of every optimizer class, to call hooks.
_STEP = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Moves the gradient hooks of `source` of both kinds to `target`; their users' handles still remove them."""
    if source._backward_hooks:
        _move(source._backward_hooks, target.register_hook)
    if source._post_accumulate_grad_hooks:
        _move(source._post_accumulate_grad_hooks, target.register_post_accumulate_grad_hook)


def _move(hooks: dict[int, Any], register: Callable[[Callable[[torch.Tensor], Any]], object]) -> None:
    for key, hook in list(hooks.items()):
        register(lambda gradient, key=key, hook=hook: hook(gradient) if key in hooks else None)  # type: ignore[misc]
        hooks[key] = lambda gradient: None  # torch holds this very dict, also where a tensor's hooks are set to None


base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""The tensor that a tensor is a view of, None if it is not a view."""

runs_in_this_backward: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the current backward will execute a node, or has."""


def mark_managed(module: nn.Module) -> None:
    """Marks a module that `fully_shard` manages, directly or from above, for other software of torch.

    Dynamo treats its parameters as inputs, since their storage is freed and allocated; `replicate` refuses it.
    """
    module.__dict__["_is_fsdp_managed_module"] = True
    module.__dict__["_fsdp_use_orig_params"] = True
    module.__dict__.setdefault(REGISTRY_KEY, {}).setdefault("fully_shard", RegistryItem())


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's `replicate` was called on a module; `fully_shard` must not manage its contents."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


NOTES_ON_MODULES = (REGISTRY_KEY, STATE_KEY)
"""The attributes that torch's composable functions, and the next one here, put on modules."""


def register_with_stock(module: nn.Module, state: object) -> None:
    """Makes `torch.distributed.fsdp.fully_shard.state(module)` return `state`, for torch's own pipelining."""
    module.__dict__.setdefault(STATE_KEY, {})[STOCK_FUNCTIONS["fully_shard"].__wrapped__] = state


def stock_engine_of(module: nn.Module) -> str | None:
    """Which of torch's own engines has sharded a module: "fully_shard", "FullyShardedDataParallel" or None.

    A module on which torch's `replicate` was called has a class of `fully_shard`'s as well, but is not sharded.
    """
    if isinstance(module, StockFSDPModule):
        ours = "shardkit.core" in {cls.__module__.rpartition(".")[0] for cls in type(module).__mro__}
        return None if ours or is_replicated(module) else "fully_shard"
    return "FullyShardedDataParallel" if isinstance(module, _STOCK_FSDP1) else None


def stock_modules_around(module: nn.Module) -> list[nn.Module]:
    """The modules that hold `module` and that torch's own `fully_shard` has sharded."""
    found = [outer for outer in list(_composable_state._module_state_mapping) if stock_engine_of(outer) is not None]
    return [outer for outer in found if any(module is inner for inner in outer.modules())]


def modules_of_stock(fsdp1: bool) -> list[nn.Module]:
    """The modules that torch's own `fully_shard` has sharded, and with `fsdp1` its `FullyShardedDataParallel`."""
    classes = [*StockFSDPModule.__subclasses__(), *([_STOCK_FSDP1] if fsdp1 else ())]
    for cls in classes:
        classes += cls.__subclasses__()
    # An object refers to its class. One call looks through the heap once, for all classes.
    found = [one for one in gc.get_referrers(*classes) if type(one) in classes]
    return [module for module in found if stock_engine_of(module) is not None]


def stock_part(name: str, attribute: str) -> Any:
    """A private name in stock's `fully_shard`, such as `_fsdp_state`."""
    return getattr(sys.modules[f"{_STOCK_PARTS}.{name}"], attribute)


def stock_training_state(name: str) -> Any:
    """The member of stock's `TrainingState` (IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD), for comparisons."""
    return getattr(stock_part("_fsdp_common", "TrainingState"), name)


def guard_stock_states(refuse: Callable[[], None]) -> Callable[[], None]:
    """Calls `refuse` when stock's `fully_shard` begins to shard a module; returns the function that ends this.

    Each call creates an `FSDPState` before it changes anything. Torch's `replicate` creates one of a subclass.
    """
    cls = stock_part("_fsdp_state", "FSDPState")
    original = cls.__init__

    @functools.wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:
            refuse()
        original(self, *args, **kwargs)

    cls.__init__ = guarded
    return lambda: setattr(cls, "__init__", original)


def grad_dtype_of(parameter: torch.Tensor) -> tuple[bool, torch.dtype | None]:
    """Whether the user has set `parameter.grad_dtype`, and to what.

    Before 2.15 torch does not record this: a `grad_dtype` equal to the parameter's own dtype counts as not set.
    """
    dtype = parameter.grad_dtype
    is_set = getattr(parameter, "_has_grad_dtype_override", dtype != parameter.dtype)
    return bool(is_set), dtype


def apply_to_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces each parameter and buffer by the result of `change`, which gets the module's own tensor objects."""
    module._apply(change)


foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_norm: Callable[..., Sequence[torch.Tensor]] = torch._foreach_norm
foreach_scale_: Callable[..., None] = torch._foreach_mul_
foreach_zero_: Callable[..., None] = torch._foreach_zero_
# Chunks of several tensors, one row of a matrix for each rank, padded with zeros.
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat


def replace_local(dtensor: torch.Tensor, local: torch.Tensor) -> None:
    """Puts another local tensor of the same shape and dtype into a DTensor."""
    cast(DTensor, dtensor)._local_tensor = local


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not a subclass with its own semantics; a fake tensor, which only lacks data, is plain."""
    return type(tensor) in (torch.Tensor, FakeTensor)


def wraps_tensors(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class has a `__torch_dispatch__`: its data may be in other tensors, in attributes."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def leaf_or_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor inside wrappers of `torch.func` transforms and DTensor, if an earlier one may lie in its memory."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if isinstance(tensor, DTensor):
        tensor = local_of(tensor)
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout is not torch.strided:
        return None  # its data lie in other tensors
    # In this order: `made_since` says which views have no answer.
    return tensor if tensor._base is not None or tensor.is_leaf else None


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of in-place writes to tensors: the counters that autograd compares. 0 for an inference tensor."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor has no counter; asking first costs more than the counter
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """The backend that serves `device` in `group`, None for groups that do not consist of backends."""
    try:
        return group._get_backend(device)
    except (RuntimeError, AttributeError):
        return None


def is_gloo_on_cpu(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a group has several ranks, and gloo serves them on CPUs: ranks of one host share memory then."""
    backend = backend_of(group, device)
    return group.size() > 1 and device.type == "cpu" and backend is not None and backend.name() == "gloo"


def timeout_of(group: ProcessGroup, device: torch.device) -> float:
    """Timeout of operations of `group`, in seconds; c10d's default if the backend does not report one."""
    options = getattr(backend_of(group, device), "options", None)
    timeout = getattr(options, "_timeout", None) or torch.distributed.distributed_c10d.default_pg_timeout
    return float(timeout.total_seconds())


# 2.13 renamed both; the old names warn from then on.
all_gather_flat: Callable[..., Any] = (
    getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
)
reduce_scatter_flat: Callable[..., Any] = (
    getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
)


# One launch of several collectives: the calls behind c10d's coalescing manager, without its bookkeeping.


def all_gather_coalesced(
    group: ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], async_op: bool
) -> Work:
    options = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = async_op
    call = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    return cast(Work, call(outputs, inputs, options))


def reduce_scatter_coalesced(
    group: ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: Any, async_op: bool
) -> Work:
    options = torch._C._distributed_c10d.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, async_op
    call = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
    return cast(Work, call(outputs, inputs, options))
