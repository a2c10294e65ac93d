"""The behaviour of FSDP1, case by case, as data: `test_behaviour.py` runs each case on stock and on ours.

Each case is a function that returns values that a script can see: numbers, names, types, the type of an error. Its
verdict is "same", "differs: how" or "refused: words of the error". `python -m tests.legacy_fsdp_compat.behaviour`
writes the tables into docs/reference/legacy_fsdp.md.
"""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

from tests.legacy_fsdp_compat.both import (
    CPU,
    OPTIMIZERS,
    STOCK,
    Block,
    Model,
    api,
    batch,
    build,
    loss_of,
    named_parameters,
    train,
    whole_gradients,
    whole_state,
)
from tests.packaging.workspace import ROOT

ARGUMENTS, METHODS = "Arguments of FullyShardedDataParallel", "Methods and properties"
DOCUMENT = ROOT / "docs" / "reference" / "legacy_fsdp.md"


class Engine:
    """Stock's or our FSDP1, for one case on one rank."""

    def __init__(self, name: str, rank: int) -> None:
        self.is_stock = name == STOCK
        self.name, self.rank = name, rank
        self.api = api(name)
        self.fsdp = self.api.FSDP

    def wrap(self, model: nn.Module | None = None, **arguments: Any) -> Any:
        """The model of all tests, or another one, with blocks as units unless the case has another policy."""
        torch.manual_seed(0)
        arguments = {"device_id": CPU, "use_orig_params": True, **arguments}
        arguments.setdefault("auto_wrap_policy", self.api.ModuleWrapPolicy({Block}))
        return self.fsdp(build() if model is None else model, **arguments)

    def trained(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 2) -> list[float]:
        """The losses of a few steps."""
        return train(model, optimizer or OPTIMIZERS["sgd"](model.parameters()), self.rank, range(steps))

    def stepped(self, **arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
        """A model and an optimizer with momentum that have trained."""
        model = self.wrap(**arguments)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        self.trained(model, optimizer)
        return model, optimizer

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        return whole_state(self.name, model)

    def gradients(self, model: nn.Module) -> dict[str, Tensor | None]:
        return whole_gradients(self.name, model)

    def losses(self, **arguments: Any) -> Any:
        """Losses and weights of a model that is wrapped with `arguments`."""
        model = self.wrap(**arguments)
        return self.trained(model), self.state(model)


@dataclass(frozen=True)
class Case:
    """One behaviour.

    Attributes:
        table: the heading of its table.
        name: the argument, method or property.
        text: the use of it that is tested.
        verdict: "same", "differs: ..." or "refused: ...".
        run: returns the result to compare.
        error: part of our message, if the verdict is "refused".
        world_size: ranks that it takes.
    """

    table: str
    name: str
    text: str
    verdict: str
    run: Callable[[Engine], Any]
    error: str
    world_size: int

    @property
    def id(self) -> str:
        return f"{self.name}: {self.text}"


CASES: list[Case] = []


def case(table: str, name: str, text: str, verdict: str = "same", error: str = "", world_size: int = 2) -> Any:
    def add(run: Callable[[Engine], Any]) -> Callable[[Engine], Any]:
        CASES.append(Case(table, name, text, verdict, run, error, world_size))
        return run

    return add


def warned(words: str, caught: list[warnings.WarningMessage]) -> bool:
    return any(words in str(one.message) for one in caught)


def lengths(state: dict[str, Any]) -> dict[str, Any]:
    """Names, kinds and shapes of the values of a state dict."""
    return {name: (type(value).__name__, tuple(value.shape)) for name, value in state.items()}


# -- arguments ---------------------------------------------------------------------------------------------------------


@case(ARGUMENTS, "module", "a model trains")
def _(engine: Engine) -> Any:
    return engine.losses()


@case(ARGUMENTS, "module", "no module", "differs: TypeError (stock: AttributeError)")
def _(engine: Engine) -> Any:
    return engine.fsdp(3, device_id=CPU)


@case(ARGUMENTS, "module", "units inside units")
def _(engine: Engine) -> Any:
    model = build()
    model.blocks[0].up = engine.fsdp(model.blocks[0].up, use_orig_params=True, device_id=CPU)
    return engine.losses(model=model)


@case(ARGUMENTS, "module", "a unit below two roots in turn")
def _(engine: Engine) -> Any:
    arguments = {"use_orig_params": True, "device_id": CPU}
    torch.manual_seed(0)
    unit = engine.fsdp(nn.Linear(4, 4), **arguments)
    roots = [engine.fsdp(nn.Sequential(unit, nn.Linear(4, 4)), **arguments) for _ in range(2)]
    for step in range(3):
        roots[step % 2](batch(engine.rank, step)[0]).square().sum().backward()
    return [engine.gradients(root) for root in roots]


@case(
    ARGUMENTS,
    "module",
    "a unit that ran as a root itself, then wrapped",
    "differs: RuntimeError (stock: AssertionError)",
)
def _(engine: Engine) -> Any:
    model = build()
    model.blocks[0] = engine.fsdp(model.blocks[0], use_orig_params=True, device_id=CPU)
    model.blocks[0](torch.ones(1, 5))
    with contextlib.redirect_stderr(None):
        return engine.fsdp(model, use_orig_params=True, device_id=CPU)(batch(0, 0)[0])


@case(ARGUMENTS, "module", "parameter names that depend on the rank")
def _(engine: Engine) -> Any:
    model = nn.Sequential()
    torch.manual_seed(0)
    model.add_module(f"rank{engine.rank}", nn.Linear(4, 1))
    return engine.losses(model=model)


@case(ARGUMENTS, "process_group", "a group of all ranks")
def _(engine: Engine) -> Any:
    return engine.losses(process_group=dist.new_group())


@case(ARGUMENTS, "process_group", "a group of one rank: NO_SHARD")
def _(engine: Engine) -> Any:
    groups = [dist.new_group([one]) for one in range(2)]
    model = engine.wrap(process_group=groups[engine.rank])
    return model.sharding_strategy.name, engine.trained(model)


@case(ARGUMENTS, "process_group", "(shard group, replicate group) for HYBRID_SHARD")
def _(engine: Engine) -> Any:
    groups = [dist.new_group([one]) for one in range(2)]
    pair = (dist.group.WORLD, groups[engine.rank])
    return engine.losses(process_group=pair, sharding_strategy=engine.api.ShardingStrategy.HYBRID_SHARD)


for _name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):

    @case(ARGUMENTS, "sharding_strategy", f"`{_name}`: losses, weights and gradients")
    def _(engine: Engine, name: str = _name) -> Any:
        model = engine.wrap(sharding_strategy=engine.api.ShardingStrategy[name])
        losses = engine.trained(model)
        return losses, engine.state(model), engine.gradients(model)


@case(
    ARGUMENTS,
    "sharding_strategy",
    "the shapes of `parameters()` outside forward",
    "differs: DTensors with this rank's rows, `Replicate` with NO_SHARD (stock: 1-D pieces of the flat parameter)",
)
def _(engine: Engine) -> Any:
    return [tuple(parameter.shape) for parameter in engine.wrap().parameters()]


@case(ARGUMENTS, "cpu_offload", "`CPUOffload(False)`")
def _(engine: Engine) -> Any:
    return engine.losses(cpu_offload=engine.api.CPUOffload(offload_params=False))


POLICIES: dict[str, Callable[[Engine], Any]] = {
    "none": lambda engine: None,
    "`ModuleWrapPolicy`": lambda engine: engine.api.ModuleWrapPolicy({nn.Linear}),
    "`transformer_auto_wrap_policy`": lambda engine: functools.partial(
        engine.api.transformer_auto_wrap_policy, transformer_layer_cls={Block}
    ),
    "`size_based_auto_wrap_policy`": lambda engine: functools.partial(
        engine.api.size_based_auto_wrap_policy, min_num_params=30
    ),
    "`lambda_auto_wrap_policy`": lambda engine: functools.partial(
        engine.api.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)
    ),
    "`always_wrap_policy`": lambda engine: engine.api.always_wrap_policy,
    "`CustomPolicy` with arguments of its own": lambda engine: engine.api.CustomPolicy(
        lambda module: {"forward_prefetch": True} if isinstance(module, Block) else False
    ),
}


for _text, _policy in POLICIES.items():

    @case(ARGUMENTS, "auto_wrap_policy", f"{_text}: which modules become units")
    def _(engine: Engine, policy: Any = _policy) -> Any:
        model = engine.wrap(auto_wrap_policy=policy(engine))
        units = [name for name, module in model.named_modules() if isinstance(module, engine.fsdp)]
        return units, engine.trained(model)


for _text in ("BACKWARD_PRE", "BACKWARD_POST", "None"):

    @case(ARGUMENTS, "backward_prefetch", f"`{_text}`")
    def _(engine: Engine, text: str = _text) -> Any:
        prefetch = None if text == "None" else engine.api.BackwardPrefetch[text]
        model = engine.wrap(backward_prefetch=prefetch)
        return engine.trained(model, steps=3), model.backward_prefetch == prefetch


@case(ARGUMENTS, "mixed_precision", "`param_dtype`: dtypes of outputs, gradients and state dict")
def _(engine: Engine) -> Any:
    model = engine.wrap(mixed_precision=engine.api.MixedPrecision(param_dtype=torch.bfloat16))
    output = model(batch(engine.rank, 0)[0])
    output.float().sum().backward()
    kinds = {str(parameter.grad.dtype) for parameter in model.parameters() if parameter.grad is not None}
    return str(output.dtype), kinds, {str(value.dtype) for value in engine.state(model).values()}


@case(ARGUMENTS, "mixed_precision", "`buffer_dtype`: buffers in training, in a state dict")
def _(engine: Engine) -> Any:
    model = engine.wrap(mixed_precision=engine.api.MixedPrecision(buffer_dtype=torch.float16))
    model(batch(engine.rank, 0)[0])
    return {str(one.dtype) for one in model.buffers()}, str(engine.state(model)["blocks.0.scale"].dtype)


@case(ARGUMENTS, "mixed_precision", "`reduce_dtype` alone")
def _(engine: Engine) -> Any:
    model = engine.wrap(mixed_precision=engine.api.MixedPrecision(reduce_dtype=torch.float64))
    return engine.trained(model)


@case(ARGUMENTS, "mixed_precision", "`keep_low_precision_grads`, also after `no_sync`")
def _(engine: Engine) -> Any:
    seen = []
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        for param, reduce in ((torch.bfloat16, None), (torch.float16, torch.float32), (None, torch.float16)):
            model = engine.wrap(
                sharding_strategy=engine.api.ShardingStrategy[strategy],
                mixed_precision=engine.api.MixedPrecision(param, reduce, keep_low_precision_grads=True),
            )
            with model.no_sync():
                model(batch(engine.rank, 0)[0]).float().sum().backward()
            for _ in range(2):  # the second adds to the first
                model(batch(engine.rank, 0)[0]).float().sum().backward()
            seen.append({str(parameter.grad.dtype) for parameter in model.parameters() if parameter.grad is not None})
    return seen


@case(ARGUMENTS, "ignored_modules", "a module")
def _(engine: Engine) -> Any:
    model = build()
    wrapped = engine.wrap(model, ignored_modules=[model.out])
    return engine.trained(wrapped), type(model.out.weight) is nn.Parameter, list(engine.state(wrapped))


@case(ARGUMENTS, "ignored_modules", "the module that is wrapped: a warning, and nothing is managed")
def _(engine: Engine) -> Any:
    model = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = engine.wrap(model, auto_wrap_policy=None, ignored_modules=[model])
    return warned("ignor", caught), {type(parameter) for parameter in wrapped.parameters()}


@case(ARGUMENTS, "ignored_modules", "together with `ignored_states`")
def _(engine: Engine) -> Any:
    model = build()
    return engine.wrap(model, ignored_modules=[model.out], ignored_states=[model.out])


@case(ARGUMENTS, "ignored_states", "parameters")
def _(engine: Engine) -> Any:
    model = build()
    wrapped = engine.wrap(model, ignored_states=[model.out.weight])
    return engine.trained(wrapped), type(model.out.weight) is nn.Parameter


@case(ARGUMENTS, "ignored_states", "modules and parameters mixed")
def _(engine: Engine) -> Any:
    model = build()
    return engine.wrap(model, ignored_states=[model.out, model.inp.weight])


@case(ARGUMENTS, "param_init_fn", "modules on the meta device get its values")
def _(engine: Engine) -> Any:
    def fill(module: nn.Module) -> None:
        module.to_empty(device=CPU, recurse=False)
        for number, parameter in enumerate(module.parameters(recurse=False), 1):
            nn.init.constant_(parameter, number)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    return engine.state(engine.wrap(model, param_init_fn=fill))


@case(ARGUMENTS, "param_init_fn", "none, and a module with `reset_parameters()`")
def _(engine: Engine) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    return lengths(engine.state(engine.wrap(model)))


for _device in ("cpu", CPU):

    @case(ARGUMENTS, "device_id", f"`{_device!r}`")
    def _(engine: Engine, device: Any = _device) -> Any:
        return str(engine.wrap(device_id=device).compute_device)


@case(ARGUMENTS, "device_id", "none, on a machine without accelerator", "differs: the CPU (stock: RuntimeError)")
def _(engine: Engine) -> Any:
    return engine.trained(engine.wrap(device_id=None))


@case(
    ARGUMENTS,
    "device_id",
    "an index, on a machine without accelerator",
    "refused: ValueError, pass torch.device('cpu') (stock: RuntimeError)",
    "this process has no accelerator",
)
def _(engine: Engine) -> Any:
    return engine.wrap(device_id=0)


@case(
    ARGUMENTS,
    "sync_module_states",
    "rank 0's parameters and buffers on all ranks, on a machine without accelerator",
    "differs: also there (stock: ValueError)",
)
def _(engine: Engine) -> Any:
    torch.manual_seed(engine.rank)
    model = Model()
    model.blocks[0].scale += engine.rank
    return engine.state(engine.fsdp(model, sync_module_states=True, device_id=CPU, use_orig_params=True))


for _argument in ("forward_prefetch", "limit_all_gathers"):
    for _value in (True, False):

        @case(ARGUMENTS, _argument, f"`{_value}`")
        def _(engine: Engine, argument: str = _argument, value: bool = _value) -> Any:
            return engine.losses(**{argument: value})


@case(ARGUMENTS, "use_orig_params", "`False`: losses and weights")
def _(engine: Engine) -> Any:
    return engine.losses(use_orig_params=False)


@case(ARGUMENTS, "use_orig_params", "`False` and parameters that are frozen in part")
def _(engine: Engine) -> Any:
    model = build()
    model.out.weight.requires_grad_(False)
    return engine.wrap(model, use_orig_params=False)


@case(ARGUMENTS, "use_orig_params", "`True` and parameters that are frozen in part")
def _(engine: Engine) -> Any:
    model = build()
    model.out.weight.requires_grad_(False)
    return engine.losses(model=model)


@case(ARGUMENTS, "use_orig_params", "`True` and an optimizer that was built before wrapping")
def _(engine: Engine) -> Any:
    model = build()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    return engine.trained(engine.wrap(model), optimizer, 3)


@case(
    ARGUMENTS,
    "use_orig_params",
    "`False` and an optimizer that was built before wrapping",
    "refused: RuntimeError in its step (stock trains nothing)",
    "this SGD holds a plain tensor for parameter 'inp.weight', from before it was sharded",
)
def _(engine: Engine) -> Any:
    model = build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return engine.trained(engine.wrap(model, use_orig_params=False), optimizer)


@case(
    ARGUMENTS,
    "use_orig_params",
    "`False`: how many parameters there are",
    "differs: as many as the model has (stock: one for each unit)",
)
def _(engine: Engine) -> Any:
    return len(list(engine.wrap(use_orig_params=False).parameters()))


@case(ARGUMENTS, "use_orig_params", "gradients of parameters that backward did not reach, in a unit that ran")
def _(engine: Engine) -> Any:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    torch.manual_seed(0)
    model = engine.wrap(Half())
    model(torch.ones(1, 4)).sum().backward()
    return {name: None if one is None else one.abs().sum() > 0 for name, one in engine.gradients(model).items()}


@case(ARGUMENTS, "device_mesh", "1-D")
def _(engine: Engine) -> Any:
    return engine.losses(device_mesh=init_device_mesh("cpu", (2,)))


@case(ARGUMENTS, "device_mesh", "2-D without names and HYBRID_SHARD: the mesh of a SHARDED state dict")
def _(engine: Engine) -> Any:
    mesh, names = init_device_mesh("cpu", (1, 2)), engine.api
    model = engine.wrap(device_mesh=mesh, sharding_strategy=names.ShardingStrategy.HYBRID_SHARD)
    with engine.fsdp.state_dict_type(model, names.StateDictType.SHARDED_STATE_DICT):
        value = model.state_dict()["inp.weight"]
    return value.device_mesh == mesh, value.device_mesh.mesh_dim_names, str(value.placements)


@case(ARGUMENTS, "device_mesh", "together with `process_group`")
def _(engine: Engine) -> Any:
    return engine.wrap(device_mesh=init_device_mesh("cpu", (2,)), process_group=dist.group.WORLD)


# -- methods -----------------------------------------------------------------------------------------------------------


@case(METHODS, "module", "the wrapped module")
def _(engine: Engine) -> Any:
    model = build()
    return engine.wrap(model).module is model


@case(METHODS, "forward", "the types of the module and of its `modules()`")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    names = [type(one).__name__ for one in model.modules()]
    return type(model) is engine.fsdp, isinstance(model, torch.distributed.fsdp.FSDPModule), names


@case(METHODS, "forward", "attributes and items of the wrapped module")
def _(engine: Engine) -> Any:
    model = engine.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    return model[1].out_features, hasattr(model, "nothing"), model.training


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor


class _OfPairs(nn.Linear):
    def forward(self, pair: _Pair) -> _Pair:
        return _Pair(super().forward(pair.first), pair.second)


@case(METHODS, "forward", "named tuples in and out, with a backward hook")
def _(engine: Engine) -> Any:
    model, seen = engine.wrap(_OfPairs(4, 4), auto_wrap_policy=None), []
    model.register_full_backward_hook(lambda module, into, out: seen.append((*into, *out)))
    x = batch(engine.rank, 0)[0].requires_grad_()
    for _ in range(2):
        pair = model(_Pair(x, x))
        (pair.first.sum() + pair.second.square().sum()).backward()
    return type(pair) is _Pair, seen, x.grad, engine.gradients(model)


@case(METHODS, "params", "its type", "same")
def _(engine: Engine) -> Any:
    return type(engine.wrap().params).__name__


@case(METHODS, "params", "how many", "differs: the unit's parameters, one by one (stock: its flat parameter)")
def _(engine: Engine) -> Any:
    return len(engine.wrap().params)


@case(METHODS, "check_is_root", "of the root and of a unit below")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    return model.check_is_root(), model.blocks[0].check_is_root()


for _root_only in (False, True):

    @case(METHODS, "fsdp_modules", f"`root_only={_root_only}`")
    def _(engine: Engine, root_only: bool = _root_only) -> Any:
        return len(engine.fsdp.fsdp_modules(nn.Sequential(engine.wrap()), root_only))


@case(METHODS, "apply", "sees whole parameters, whose changes stay")
def _(engine: Engine) -> Any:
    def double(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(2)

    model = engine.wrap()
    model.apply(double)
    return engine.state(model)


@case(METHODS, "named_parameters", "names outside and inside `summon_full_params`")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    outside = [name for name, _ in model.named_parameters(prefix="p")]
    with engine.fsdp.summon_full_params(model):
        return outside, [name for name, _ in model.named_parameters(prefix="p")]


@case(
    METHODS,
    "named_parameters",
    "names with `use_orig_params=False`, outside `summon_full_params`",
    "differs: those of the model's parameters, with the prefix of wrapping (stock: `..._flat_param`)",
)
def _(engine: Engine) -> Any:
    return [name for name, _ in engine.wrap(use_orig_params=False).named_parameters()]


@case(METHODS, "named_buffers", "names outside and inside `summon_full_params`")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    outside = [name for name, _ in model.named_buffers()]
    with engine.fsdp.summon_full_params(model):
        return outside, [name for name, _ in model.named_buffers()]


KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")

for _kind in KINDS:

    @case(METHODS, "set_state_dict_type", f"`{_kind}`: names and types of `state_dict()`, and the previous type")
    def _(engine: Engine, kind: str = _kind) -> Any:
        names = engine.api
        model = engine.wrap(use_orig_params=False)
        before = engine.fsdp.set_state_dict_type(model, names.StateDictType[kind])
        state = {name: type(value).__name__ for name, value in model.state_dict().items()}
        return state, before.state_dict_type.name, type(before.state_dict_config).__name__

    @case(METHODS, "state_dict", f"`{_kind}` with `use_orig_params=True`: names and types")
    def _(engine: Engine, kind: str = _kind) -> Any:
        model = engine.wrap()
        with engine.fsdp.state_dict_type(model, engine.api.StateDictType[kind]):
            return {name: type(value).__name__ for name, value in model.state_dict().items()}

    @case(METHODS, "state_dict_type", f"`{_kind}`: a state dict loads into another model")
    def _(engine: Engine, kind: str = _kind) -> Any:
        names = engine.api
        model, other = engine.wrap(use_orig_params=False), engine.wrap(build(1), use_orig_params=False)
        with engine.fsdp.state_dict_type(model, names.StateDictType[kind]):
            state = model.state_dict()
        with engine.fsdp.state_dict_type(other, names.StateDictType[kind]):
            other.load_state_dict(state)
        return engine.state(other)


@case(METHODS, "state_dict_type", "a configuration of another type")
def _(engine: Engine) -> Any:
    names, model = engine.api, engine.wrap()
    with engine.fsdp.state_dict_type(model, names.StateDictType.FULL_STATE_DICT, names.ShardedStateDictConfig()):
        return "accepted"


@case(METHODS, "state_dict_type", "the type after an exception inside", "differs: the old one (stock: the new one)")
def _(engine: Engine) -> Any:
    names, model = engine.api, engine.wrap()
    with (
        contextlib.suppress(ZeroDivisionError),
        engine.fsdp.state_dict_type(model, names.StateDictType.SHARDED_STATE_DICT),
    ):
        raise ZeroDivisionError
    return engine.fsdp.get_state_dict_type(model).state_dict_type.name


@case(METHODS, "get_state_dict_type", "units with different types")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    engine.fsdp.set_state_dict_type(model.blocks[0], engine.api.StateDictType.SHARDED_STATE_DICT)
    return engine.fsdp.get_state_dict_type(model)


@case(METHODS, "summon_full_params", "values, shapes and names")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with engine.fsdp.summon_full_params(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


for _writeback in (True, False):

    @case(METHODS, "summon_full_params", f"`writeback={_writeback}`: in-place changes afterwards")
    def _(engine: Engine, writeback: bool = _writeback) -> Any:
        model = engine.wrap()
        with engine.fsdp.summon_full_params(model, writeback=writeback), torch.no_grad():
            model.out.weight.fill_(3.0)
        return engine.state(model)


@case(METHODS, "summon_full_params", "`writeback=True` and `rank0_only=True`")
def _(engine: Engine) -> Any:
    with engine.fsdp.summon_full_params(engine.wrap(), writeback=True, rank0_only=True):
        return "accepted"


@case(METHODS, "summon_full_params", "inside itself")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with contextlib.redirect_stderr(None), engine.fsdp.summon_full_params(model), engine.fsdp.summon_full_params(model):
        return "accepted"


@case(METHODS, "summon_full_params", "`recurse=False`")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with engine.fsdp.summon_full_params(model, recurse=False):
        return tuple(model.module.out.weight.shape), type(model.module.out.weight).__name__


@case(METHODS, "summon_full_params", "`with_grads=True`")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    loss_of(model, engine.rank, 0).backward()
    return engine.gradients(model)


@case(
    METHODS,
    "summon_full_params",
    "`with_grads=True` and `use_orig_params=False`",
    "differs: gives gradients (stock: NotImplementedError)",
)
def _(engine: Engine) -> Any:
    model = engine.wrap(use_orig_params=False)
    loss_of(model, engine.rank, 0).backward()
    return [one is not None for one in engine.gradients(model).values()]


@case(
    METHODS,
    "summon_full_params",
    "`with_grads=True`: gradients of frozen parameters",
    "differs: None (stock: zeros, if others of the unit have gradients)",
)
def _(engine: Engine) -> Any:
    model = build()
    model.inp.weight.requires_grad_(False)
    wrapped = engine.wrap(model, auto_wrap_policy=None)
    loss_of(wrapped, engine.rank, 0).backward()
    return engine.gradients(wrapped)["inp.weight"] is None


@case(
    METHODS,
    "summon_full_params",
    "`parameter.data = ...` inside",
    "differs: is written back (stock drops it)",
)
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with engine.fsdp.summon_full_params(model):
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
    return engine.state(model)


for _strategy in ("FULL_SHARD", "NO_SHARD"):

    @case(METHODS, "summon_full_params", f"changes between forward and backward, with `{_strategy}`")
    def _(engine: Engine, strategy: str = _strategy) -> Any:
        model = engine.wrap(sharding_strategy=engine.api.ShardingStrategy[strategy])
        loss = loss_of(model, engine.rank, 0)
        with engine.fsdp.summon_full_params(model), torch.no_grad():
            model.out.weight.mul_(2)
        loss.backward()
        return engine.gradients(model)


@case(METHODS, "no_sync", "accumulation: gradients after the synchronised backward")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with model.no_sync():
        loss_of(model, engine.rank, 0).backward()
    loss_of(model, engine.rank, 1).backward()
    return engine.gradients(model)


@case(
    METHODS,
    "no_sync",
    "`optimizer.zero_grad()` after a backward inside",
    "differs: keeps the gradient of that backward (stock drops it); call `model.zero_grad()`",
)
def _(engine: Engine) -> Any:
    model = engine.wrap()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with model.no_sync():
        loss_of(model, engine.rank, 0).backward()
    optimizer.zero_grad()
    loss_of(model, engine.rank, 1).backward()
    return engine.gradients(model)


@case(METHODS, "no_sync", "`model.zero_grad()` after a backward inside")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with model.no_sync():
        loss_of(model, engine.rank, 0).backward()
    model.zero_grad()
    loss_of(model, engine.rank, 1).backward()
    return engine.gradients(model)


@case(
    METHODS,
    "no_sync",
    "`model.zero_grad()` after a synchronised backward and one inside",
    "differs: drops both gradients (stock keeps the synchronised one)",
)
def _(engine: Engine) -> Any:
    model = engine.wrap()
    loss_of(model, engine.rank, 0).backward()
    with model.no_sync():
        loss_of(model, engine.rank, 1).backward()
    model.zero_grad()
    loss_of(model, engine.rank, 2).backward()
    return engine.gradients(model)


@case(
    METHODS,
    "no_sync",
    "the type of `parameter.grad` after a backward inside",
    "differs: None (stock: this rank's whole gradient)",
)
def _(engine: Engine) -> Any:
    model = engine.wrap(nn.Linear(4, 4), auto_wrap_policy=None)
    with model.no_sync():
        model(batch(engine.rank, 0)[0]).sum().backward()
    return [type(parameter.grad).__name__ for parameter in model.parameters()]


@case(METHODS, "no_sync", "on a unit below the root")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    model(batch(engine.rank, 0)[0])
    with model.blocks[0].no_sync():
        return "accepted"


for _norm in (2.0, 1.0, float("inf")):

    @case(METHODS, "clip_grad_norm_", f"norm {_norm:g}: the norm and the gradients")
    def _(engine: Engine, norm: float = _norm) -> Any:
        model = engine.wrap()
        loss_of(model, engine.rank, 0).backward()
        return model.clip_grad_norm_(0.05, norm), engine.gradients(model)


@case(METHODS, "clip_grad_norm_", "on a unit below the root")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    loss_of(model, engine.rank, 0).backward()
    return model.blocks[0].clip_grad_norm_(0.05)


@case(METHODS, "clip_grad_norm_", "without gradients: warns, gives zero")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norm = model.clip_grad_norm_(0.05)
    return norm, warned("no gradients", caught)


def momentum(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value["momentum_buffer"] for name, value in sorted(state["state"].items())}


@case(METHODS, "full_optim_state_dict", "names and values")
def _(engine: Engine) -> Any:
    model, optimizer = engine.stepped()
    return momentum(engine.fsdp.full_optim_state_dict(model, optimizer, rank0_only=False))


@case(METHODS, "full_optim_state_dict", "groups of parameters")
def _(engine: Engine) -> Any:
    model, optimizer = engine.stepped()
    groups = engine.fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)["param_groups"]
    return [(group["lr"], group["momentum"], sorted(group["params"])) for group in groups]


@case(METHODS, "full_optim_state_dict", "on ranks whose optimizers list parameters in another order")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS["momentum"](parameters if engine.rank == 0 else parameters[::-1])
    engine.trained(model, optimizer)
    return momentum(engine.fsdp.full_optim_state_dict(model, optimizer, rank0_only=False))


@case(METHODS, "sharded_optim_state_dict", "names and types")
def _(engine: Engine) -> Any:
    model, optimizer = engine.stepped()
    with engine.fsdp.state_dict_type(model, engine.api.StateDictType.SHARDED_STATE_DICT):
        state = engine.fsdp.sharded_optim_state_dict(model, optimizer)["state"]
    return {name: type(value["momentum_buffer"]).__name__ for name, value in sorted(state.items())}


def reloaded(engine: Engine, convert: Callable[[Any, Any, Any], Any]) -> Any:
    """Losses of a second model that goes on with the weights and the optimizer state of a first."""
    model, optimizer = engine.stepped()
    other = engine.wrap(build(1))
    other.load_state_dict(engine.state(model))
    its = OPTIMIZERS["momentum"](other.parameters())
    its.load_state_dict(convert((model, optimizer), other, its))
    return engine.trained(other, its)


@case(METHODS, "shard_full_optim_state_dict", "training goes on")
def _(engine: Engine) -> Any:
    def convert(first: Any, model: Any, optimizer: Any) -> Any:
        state = engine.fsdp.full_optim_state_dict(*first, rank0_only=False)
        return engine.fsdp.shard_full_optim_state_dict(state, model, optim=optimizer)

    return reloaded(engine, convert)


@case(METHODS, "scatter_full_optim_state_dict", "training goes on")
def _(engine: Engine) -> Any:
    def convert(first: Any, model: Any, optimizer: Any) -> Any:
        state = engine.fsdp.full_optim_state_dict(*first)
        return engine.fsdp.scatter_full_optim_state_dict(state if engine.rank == 0 else None, model, optim=optimizer)

    return reloaded(engine, convert)


@case(METHODS, "flatten_sharded_optim_state_dict", "training goes on")
def _(engine: Engine) -> Any:
    def convert(first: Any, model: Any, optimizer: Any) -> Any:
        kind = engine.api.StateDictType.SHARDED_STATE_DICT
        with engine.fsdp.state_dict_type(first[0], kind), engine.fsdp.state_dict_type(model, kind):
            state = engine.fsdp.sharded_optim_state_dict(*first)
            return engine.fsdp.flatten_sharded_optim_state_dict(state, model, optimizer)

    return reloaded(engine, convert)


@case(METHODS, "optim_state_dict", "FULL: names and values")
def _(engine: Engine) -> Any:
    return momentum(engine.fsdp.optim_state_dict(*engine.stepped()))


@case(
    METHODS,
    "optim_state_dict",
    "tensors of NO_SHARD, after the next step",
    "differs: copies, which stay (stock: the optimizer's own tensors)",
)
def _(engine: Engine) -> Any:
    model, optimizer = engine.stepped(sharding_strategy=engine.api.ShardingStrategy.NO_SHARD)
    state = momentum(engine.fsdp.optim_state_dict(model, optimizer))
    before = {name: value.clone() for name, value in state.items()}
    engine.trained(model, optimizer)
    return [torch.equal(before[name], state[name]) for name in before]


@case(METHODS, "optim_state_dict_to_load", "training goes on")
def _(engine: Engine) -> Any:
    def convert(first: Any, model: Any, optimizer: Any) -> Any:
        return engine.fsdp.optim_state_dict_to_load(model, optimizer, engine.fsdp.optim_state_dict(*first))

    return reloaded(engine, convert)


@case(
    METHODS,
    "optim_state_dict_to_load",
    "groups that hold other parameters than in the state dict",
    "refused: ValueError with the names (stock swaps state of one shape)",
    "which the optimizer has in another group",
)
def _(engine: Engine) -> Any:
    model = engine.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), auto_wrap_policy=None)
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizer = OPTIMIZERS["momentum"]([{"params": first}, {"params": second}])
    model(batch(engine.rank, 0)[0]).sum().backward()
    optimizer.step()
    other = OPTIMIZERS["momentum"]([{"params": second}, {"params": first}])
    engine.fsdp.optim_state_dict_to_load(model, other, engine.fsdp.optim_state_dict(model, optimizer))
    return "accepted"


@case(METHODS, "rekey_optim_state_dict", "names for numbers")
def _(engine: Engine) -> Any:
    model = build()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    engine.trained(model, optimizer)
    names = engine.api.OptimStateKeyType.PARAM_NAME
    state = engine.fsdp.rekey_optim_state_dict(optimizer.state_dict(), names, model, optim=optimizer)
    return list(state["state"]), [group["params"] for group in state["param_groups"]]


@case(METHODS, "register_comm_hook", "torch's `allreduce_hook` and `reduce_scatter_hook`")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)
    return engine.trained(model)


@case(METHODS, "register_comm_hook", "a second one")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    for _ in range(2):
        model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)


@case(
    METHODS,
    "_flat_param",
    "of an FSDP module",
    "refused: AttributeError, there is no flat parameter",
    "there is no flat parameter here",
)
def _(engine: Engine) -> Any:
    return type(engine.wrap(use_orig_params=False)._flat_param).__name__


@case(
    METHODS,
    "_handle",
    "of an FSDP module",
    "refused: AttributeError, there is no flat parameter",
    "there is no flat parameter here",
)
def _(engine: Engine) -> Any:
    return type(engine.wrap()._handle).__name__


# -- writes of scripts -------------------------------------------------------------------------------------------------


WRITES = "Writing to parameters"


@case(
    WRITES,
    "parameter.data = ...",
    "outside `summon_full_params`",
    "refused: RuntimeError in the next forward, `state_dict()` or `summon_full_params` (stock writes it back)",
    "the data of parameter 'weight' was replaced",
)
def _(engine: Engine) -> Any:
    model = engine.wrap(nn.Linear(8, 8), auto_wrap_policy=None)
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    return model(torch.ones(1, 8))


@case(
    WRITES,
    "parameter.grad.data = ...",
    "before a step",
    "refused: RuntimeError in the step (stock steps with it)",
    "the data of the gradient of parameter 'weight' was replaced",
)
def _(engine: Engine) -> Any:
    model = engine.wrap(nn.Linear(8, 8), auto_wrap_policy=None)
    model(torch.ones(1, 8)).sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data * 0
    return OPTIMIZERS["sgd"](model.parameters()).step()


@case(WRITES, "parameter.data.mul_(...)", "outside `summon_full_params`")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    return engine.state(model)


@case(
    WRITES,
    "module.weight = nn.Parameter(...)",
    "a plain one in the place of a sharded one",
    "differs: ValueError with the name (stock: RuntimeError)",
)
def _(engine: Engine) -> Any:
    model = engine.wrap(nn.Linear(8, 8), auto_wrap_policy=None)
    model.module.weight = nn.Parameter(torch.ones(8, 8))
    return model(torch.ones(1, 8))


@case(WRITES, "module.weight.requires_grad_(False)", "between steps")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    losses = engine.trained(model, optimizer)
    for _, parameter in named_parameters(model):
        parameter.requires_grad_(False)
    with torch.no_grad():
        return losses, model(batch(engine.rank, 5)[0])


# -- the document ------------------------------------------------------------------------------------------------------


def rows(heading: str) -> str:
    """The table of one heading."""
    lines = ["| | | |", "|---|---|---|"]
    before = ""
    for one in CASES:
        if one.table == heading:
            lines.append(f"| {'' if one.name == before else f'`{one.name}`'} | {one.text} | {one.verdict} |")
            before = one.name
    return "\n".join(lines) + "\n"


def generated(document: str) -> str:
    """The document with the tables of all headings made anew."""
    for heading in dict.fromkeys(one.table for one in CASES):
        before, _, rest = document.partition(f"## {heading}\n")
        section, mark, after = rest.partition("\n## ")
        text = section[: section.index("| | | |")]
        notes = section[section.index("| | | |") :].partition("\n\n")[2]
        document = f"{before}## {heading}\n{text}{rows(heading)}" + (f"\n{notes}" if notes else "") + mark + after
    return document


def arguments_of(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)


def methods() -> dict[str, object]:
    return {name: value for name, value in vars(stock.FullyShardedDataParallel).items() if not name.startswith("_")}


if __name__ == "__main__":
    DOCUMENT.write_text(generated(DOCUMENT.read_text()))
