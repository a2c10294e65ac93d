"""The behaviour of FSDP1, case by case, as data: `test_behaviour.py` runs each case on stock and on ours.

Each case is a function that returns values that a script can see: numbers, names, types, the type of an error. Its
verdict is "same", "differs: how" or "refused: words of the error". `python -m tests.legacy_fsdp_compat.behaviour`
writes the tables into docs/reference/legacy_fsdp.md.
"""

import contextlib
import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

from scripts.workspace import ROOT
from tests.legacy_fsdp_compat import both
from tests.legacy_fsdp_compat.both import CPU, OPTIMIZERS, Block, Model, batch, build, loss_of, named_parameters, train
from tests.support.models import Composed

ARGUMENTS, METHODS = "Arguments of FullyShardedDataParallel", "Methods and properties"
WRITES = "Writing to parameters"
DOCUMENT = ROOT / "docs" / "reference" / "legacy_fsdp.md"


class Engine(both.Engine):
    """Stock's or our FSDP1, for one case on one rank."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(name)
        self.rank, self.fsdp = rank, self.api.FSDP

    def wrap(self, model: nn.Module | None = None, strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
        """The model of all tests, or another one, with blocks as units unless the case has another policy."""
        torch.manual_seed(0)
        arguments = {"device_id": CPU, "use_orig_params": True, **arguments}
        arguments.setdefault("auto_wrap_policy", self.api.ModuleWrapPolicy({Block}))
        arguments.setdefault("sharding_strategy", self.api.ShardingStrategy[strategy])
        return self.fsdp(build() if model is None else model, **arguments)

    def unit(self, module: nn.Module) -> Any:
        return self.fsdp(module, use_orig_params=True, device_id=CPU)

    def layer(self) -> Any:
        return self.wrap(nn.Linear(8, 8), auto_wrap_policy=None)

    def in_dtypes(self, *dtypes: torch.dtype | None, strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
        return self.wrap(strategy=strategy, mixed_precision=self.api.MixedPrecision(*dtypes, **arguments))

    def backward(self, model: nn.Module, step: int = 0) -> None:
        loss_of(model, self.rank, step).backward()

    def after_backward(self, **arguments: Any) -> Any:
        model = self.wrap(**arguments)
        self.backward(model)
        return model

    def after(self, *calls: str) -> dict[str, Tensor | None]:
        """Gradients after these calls: "backward", "no_sync" (a backward inside it) and "zero_grad" of either."""
        model = self.wrap()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for step, call in enumerate(calls):
            if call == "no_sync":
                with model.no_sync():
                    self.backward(model, step)
            elif call == "backward":
                self.backward(model, step)
            else:
                {"model.zero_grad": model, "optimizer.zero_grad": optimizer}[call].zero_grad()
        return self.gradients(model)

    def trained(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 2) -> list[float]:
        return train(model, optimizer or OPTIMIZERS["sgd"](model.parameters()), self.rank, range(steps))

    def stepped(self, **arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
        """A model and an optimizer with momentum that have trained."""
        model = self.wrap(**arguments)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        self.trained(model, optimizer)
        return model, optimizer

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
    """

    table: str
    name: str
    text: str
    verdict: str
    run: Callable[[Engine], Any]
    error: str

    @property
    def id(self) -> str:
        return f"{self.name}: {self.text}"


CASES: list[Case] = []


def case(
    table: str, name: str, text: str, run: Any = None, *, differs: str = "", refused: str = "", error: str = ""
) -> Any:
    """Adds a case, which is `run` or the function that this decorates."""
    verdict = f"differs: {differs}" if differs else f"refused: {refused}" if refused else "same"

    def add(run: Callable[[Engine], Any]) -> Callable[[Engine], Any]:
        CASES.append(Case(table, name, text, verdict, run, error))
        return run

    return add if run is None else add(run)


argument, method, write = (functools.partial(case, table) for table in (ARGUMENTS, METHODS, WRITES))


def warning_of(words: str, call: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether a call warns so, and its result."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return any(words in str(one.message) for one in caught), result


def types(state: dict[str, Any]) -> dict[str, str]:
    return {name: type(value).__name__ for name, value in state.items()}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def with_frozen(name: str) -> Model:
    model = build()
    model.get_parameter(name).requires_grad_(False)
    return model


# -- arguments ---------------------------------------------------------------------------------------------------------


argument("module", "a model trains", lambda engine: engine.losses())
argument("module", "no module", lambda engine: engine.unit(3), differs="TypeError (stock: AttributeError)")


@argument("module", "units inside units")
def _(engine: Engine) -> Any:
    model = build()
    model.blocks[0].up = engine.unit(model.blocks[0].up)
    return engine.losses(model=model)


@argument("module", "a unit below two roots in turn")
def _(engine: Engine) -> Any:
    torch.manual_seed(0)
    unit = engine.unit(nn.Linear(4, 4))
    roots = [engine.unit(nn.Sequential(unit, nn.Linear(4, 4))) for _ in range(2)]
    for step in range(3):
        roots[step % 2](batch(engine.rank, step)[0]).square().sum().backward()
    return [engine.gradients(root) for root in roots]


@argument("module", "a unit that ran as a root itself, then wrapped", differs="RuntimeError (stock: AssertionError)")
def _(engine: Engine) -> Any:
    model = build()
    model.blocks[0] = engine.unit(model.blocks[0])
    model.blocks[0](torch.ones(1, 5))
    with contextlib.redirect_stderr(None):
        return engine.unit(model)(batch(0, 0)[0])


@argument("module", "parameter names that depend on the rank")
def _(engine: Engine) -> Any:
    torch.manual_seed(0)
    return engine.losses(model=nn.Sequential(OrderedDict({f"rank{engine.rank}": nn.Linear(4, 1)})))


argument("process_group", "a group of all ranks", lambda engine: engine.losses(process_group=dist.new_group()))


@argument("process_group", "a group of one rank: NO_SHARD")
def _(engine: Engine) -> Any:
    groups = [dist.new_group([one]) for one in range(2)]
    model = engine.wrap(process_group=groups[engine.rank])
    return model.sharding_strategy.name, engine.trained(model)


@argument("process_group", "(shard group, replicate group) for HYBRID_SHARD")
def _(engine: Engine) -> Any:
    groups = [dist.new_group([one]) for one in range(2)]
    return engine.losses(process_group=(dist.group.WORLD, groups[engine.rank]), strategy="HYBRID_SHARD")


for _name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):

    @argument("sharding_strategy", f"`{_name}`: losses, weights and gradients")
    def _(engine: Engine, name: str = _name) -> Any:
        model = engine.wrap(strategy=name)
        losses = engine.trained(model)
        return losses, engine.state(model), engine.gradients(model)


argument(
    "sharding_strategy",
    "the shapes of `parameters()` outside forward",
    lambda engine: [tuple(parameter.shape) for parameter in engine.wrap().parameters()],
    differs="DTensors with this rank's rows, `Replicate` with NO_SHARD (stock: 1-D pieces of the flat parameter)",
)
argument("cpu_offload", "`CPUOffload(False)`", lambda engine: engine.losses(cpu_offload=engine.api.CPUOffload(False)))

POLICIES: dict[str, Callable[[Any], Any]] = {
    "none": lambda names: None,
    "`ModuleWrapPolicy`": lambda names: names.ModuleWrapPolicy({nn.Linear}),
    "`transformer_auto_wrap_policy`": lambda names: functools.partial(
        names.transformer_auto_wrap_policy, transformer_layer_cls={Block}
    ),
    "`size_based_auto_wrap_policy`": lambda names: functools.partial(
        names.size_based_auto_wrap_policy, min_num_params=30
    ),
    "`lambda_auto_wrap_policy`": lambda names: functools.partial(
        names.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)
    ),
    "`always_wrap_policy`": lambda names: names.always_wrap_policy,
    "`CustomPolicy` with arguments of its own": lambda names: names.CustomPolicy(
        lambda module: {"forward_prefetch": True} if isinstance(module, Block) else False
    ),
}
for _text, _policy in POLICIES.items():

    @argument("auto_wrap_policy", f"{_text}: which modules become units")
    def _(engine: Engine, policy: Any = _policy) -> Any:
        model = engine.wrap(auto_wrap_policy=policy(engine.api))
        units = [name for name, module in model.named_modules() if isinstance(module, engine.fsdp)]
        return units, engine.trained(model)


for _text in ("BACKWARD_PRE", "BACKWARD_POST", "None"):

    @argument("backward_prefetch", f"`{_text}`")
    def _(engine: Engine, text: str = _text) -> Any:
        prefetch = None if text == "None" else engine.api.BackwardPrefetch[text]
        model = engine.wrap(backward_prefetch=prefetch)
        return engine.trained(model, steps=3), model.backward_prefetch == prefetch


def dtypes_of_gradients(model: nn.Module) -> set[str]:
    return {str(parameter.grad.dtype) for parameter in model.parameters() if parameter.grad is not None}


@argument("mixed_precision", "`param_dtype`: dtypes of outputs, gradients and state dict")
def _(engine: Engine) -> Any:
    model = engine.in_dtypes(torch.bfloat16)
    output = model(batch(engine.rank, 0)[0])
    output.float().sum().backward()
    return str(output.dtype), dtypes_of_gradients(model), {str(one.dtype) for one in engine.state(model).values()}


@argument("mixed_precision", "`buffer_dtype`: buffers in training, in a state dict")
def _(engine: Engine) -> Any:
    model = engine.in_dtypes(buffer_dtype=torch.float16)
    model(batch(engine.rank, 0)[0])
    return {str(one.dtype) for one in model.buffers()}, str(engine.state(model)["blocks.0.scale"].dtype)


argument(
    "mixed_precision", "`reduce_dtype` alone", lambda engine: engine.trained(engine.in_dtypes(None, torch.float64))
)


@argument("mixed_precision", "`keep_low_precision_grads`, also after `no_sync`")
def _(engine: Engine) -> Any:
    seen = []
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        for dtypes in ((torch.bfloat16, None), (torch.float16, torch.float32), (None, torch.float16)):
            model = engine.in_dtypes(*dtypes, strategy=strategy, keep_low_precision_grads=True)
            with model.no_sync():
                model(batch(engine.rank, 0)[0]).float().sum().backward()
            for _ in range(2):  # the second adds to the first
                model(batch(engine.rank, 0)[0]).float().sum().backward()
            seen.append(dtypes_of_gradients(model))
    return seen


@argument("ignored_modules", "a module")
def _(engine: Engine) -> Any:
    model = build()
    wrapped = engine.wrap(model, ignored_modules=[model.out])
    return engine.trained(wrapped), type(model.out.weight) is nn.Parameter, list(engine.state(wrapped))


@argument("ignored_modules", "the module that is wrapped: a warning, and nothing is managed")
def _(engine: Engine) -> Any:
    model = build()
    call = functools.partial(engine.wrap, model, auto_wrap_policy=None, ignored_modules=[model])
    warned, wrapped = warning_of("ignor", call)
    return warned, {type(parameter) for parameter in wrapped.parameters()}


@argument("ignored_modules", "together with `ignored_states`")
def _(engine: Engine) -> Any:
    model = build()
    return engine.wrap(model, ignored_modules=[model.out], ignored_states=[model.out])


@argument("ignored_states", "parameters")
def _(engine: Engine) -> Any:
    model = build()
    wrapped = engine.wrap(model, ignored_states=[model.out.weight])
    return engine.trained(wrapped), type(model.out.weight) is nn.Parameter


@argument("ignored_states", "modules and parameters mixed")
def _(engine: Engine) -> Any:
    model = build()
    return engine.wrap(model, ignored_states=[model.out, model.inp.weight])


@argument("param_init_fn", "modules on the meta device get its values")
def _(engine: Engine) -> Any:
    def fill(module: nn.Module) -> None:
        module.to_empty(device=CPU, recurse=False)
        for number, parameter in enumerate(module.parameters(recurse=False), 1):
            nn.init.constant_(parameter, number)

    return engine.state(engine.wrap(small().to("meta"), param_init_fn=fill))


@argument("param_init_fn", "none, and a module with `reset_parameters()`")
def _(engine: Engine) -> Any:
    state = engine.state(engine.wrap(small().to("meta")))
    return types(state), [tuple(value.shape) for value in state.values()]


argument("device_id", "`'cpu'`", lambda engine: str(engine.wrap(device_id="cpu").compute_device))
argument("device_id", f"`{CPU!r}`", lambda engine: str(engine.wrap(device_id=CPU).compute_device))
argument(
    "device_id",
    "none, on a machine without accelerator",
    lambda engine: engine.trained(engine.wrap(device_id=None)),
    differs="the CPU (stock: RuntimeError)",
)
argument(
    "device_id",
    "an index, on a machine without accelerator",
    lambda engine: engine.wrap(device_id=0),
    refused="ValueError, pass torch.device('cpu') (stock: RuntimeError)",
    error="this process has no accelerator",
)


@argument(
    "sync_module_states",
    "rank 0's parameters and buffers on all ranks, on a machine without accelerator",
    differs="also there (stock: ValueError)",
)
def _(engine: Engine) -> Any:
    torch.manual_seed(engine.rank)
    model = Model()
    model.blocks[0].scale += engine.rank
    return engine.state(engine.fsdp(model, sync_module_states=True, device_id=CPU, use_orig_params=True))


argument("forward_prefetch", "`True`", lambda engine: engine.losses(forward_prefetch=True))
argument("forward_prefetch", "`False`", lambda engine: engine.losses(forward_prefetch=False))
argument("limit_all_gathers", "`True`", lambda engine: engine.losses(limit_all_gathers=True))
argument("limit_all_gathers", "`False`", lambda engine: engine.losses(limit_all_gathers=False))
_NAME = "use_orig_params"
argument(_NAME, "`False`: losses and weights", lambda engine: engine.losses(use_orig_params=False))
argument(
    _NAME,
    "`False` and parameters that are frozen in part",
    lambda engine: engine.wrap(with_frozen("out.weight"), use_orig_params=False),
)
argument(
    _NAME,
    "`True` and parameters that are frozen in part",
    lambda engine: engine.losses(model=with_frozen("out.weight")),
)


@argument(_NAME, "`True` and an optimizer that was built before wrapping")
def _(engine: Engine) -> Any:
    model = build()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    return engine.trained(engine.wrap(model), optimizer, 3)


@argument(
    _NAME,
    "`False` and an optimizer that was built before wrapping",
    refused="RuntimeError in its step (stock trains nothing)",
    error="this SGD holds a plain tensor for parameter 'inp.weight', from before it was sharded",
)
def _(engine: Engine) -> Any:
    model = build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return engine.trained(engine.wrap(model, use_orig_params=False), optimizer)


argument(
    _NAME,
    "`False`: how many parameters there are",
    lambda engine: len(list(engine.wrap(use_orig_params=False).parameters())),
    differs="as many as the model has (stock: one for each unit)",
)


@argument(_NAME, "gradients of parameters that backward did not reach, in a unit that ran")
def _(engine: Engine) -> Any:
    torch.manual_seed(0)
    half = Composed(lambda m, x: m.used(x), used=nn.Linear(4, 4), unused=nn.Linear(4, 4))
    model = engine.wrap(half)
    model(torch.ones(1, 4)).sum().backward()
    return {name: None if one is None else one.abs().sum() > 0 for name, one in engine.gradients(model).items()}


argument("device_mesh", "1-D", lambda engine: engine.losses(device_mesh=init_device_mesh("cpu", (2,))))


@argument("device_mesh", "2-D without names and HYBRID_SHARD: the mesh of a SHARDED state dict")
def _(engine: Engine) -> Any:
    mesh = init_device_mesh("cpu", (1, 2))
    model = engine.wrap(device_mesh=mesh, strategy="HYBRID_SHARD")
    with engine.of_type("SHARDED", model):
        value = model.state_dict()["inp.weight"]
    return value.device_mesh == mesh, value.device_mesh.mesh_dim_names, str(value.placements)


argument(
    "device_mesh",
    "together with `process_group`",
    lambda engine: engine.wrap(device_mesh=init_device_mesh("cpu", (2,)), process_group=dist.group.WORLD),
)


# -- methods -----------------------------------------------------------------------------------------------------------


@method("module", "the wrapped module")
def _(engine: Engine) -> Any:
    model = build()
    return engine.wrap(model).module is model


@method("forward", "the types of the module and of its `modules()`")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    names = [type(one).__name__ for one in model.modules()]
    return type(model) is engine.fsdp, isinstance(model, torch.distributed.fsdp.FSDPModule), names


@method("forward", "attributes and items of the wrapped module")
def _(engine: Engine) -> Any:
    model = engine.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    return model[1].out_features, hasattr(model, "nothing"), model.training


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor


class _OfPairs(nn.Linear):
    def forward(self, pair: _Pair) -> _Pair:
        return _Pair(super().forward(pair.first), pair.second)


@method("forward", "named tuples in and out, with a backward hook")
def _(engine: Engine) -> Any:
    model, seen = engine.wrap(_OfPairs(4, 4), auto_wrap_policy=None), []
    model.register_full_backward_hook(lambda module, into, out: seen.append((*into, *out)))
    x = batch(engine.rank, 0)[0].requires_grad_()
    for _ in range(2):
        pair = model(_Pair(x, x))
        (pair.first.sum() + pair.second.square().sum()).backward()
    return type(pair) is _Pair, seen, x.grad, engine.gradients(model)


method("params", "its type", lambda engine: type(engine.wrap().params).__name__)
method(
    "params",
    "how many",
    lambda engine: len(engine.wrap().params),
    differs="the unit's parameters, one by one (stock: its flat parameter)",
)


@method("check_is_root", "of the root and of a unit below")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    return model.check_is_root(), model.blocks[0].check_is_root()


for _root_only in (False, True):

    @method("fsdp_modules", f"`root_only={_root_only}`")
    def _(engine: Engine, root_only: bool = _root_only) -> Any:
        return len(engine.fsdp.fsdp_modules(nn.Sequential(engine.wrap()), root_only))


@method("apply", "sees whole parameters, whose changes stay")
def _(engine: Engine) -> Any:
    @torch.no_grad()
    def double(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.mul_(2)

    return engine.state(engine.wrap().apply(double))


def outside_and_inside(engine: Engine, names: Callable[[Any], Any]) -> Any:
    model = engine.wrap()
    outside = [name for name, _ in names(model)]
    with engine.fsdp.summon_full_params(model):
        return outside, [name for name, _ in names(model)]


method(
    "named_parameters",
    "names outside and inside `summon_full_params`",
    lambda engine: outside_and_inside(engine, lambda model: model.named_parameters(prefix="p")),
)
method(
    "named_parameters",
    "names with `use_orig_params=False`, outside `summon_full_params`",
    lambda engine: [name for name, _ in engine.wrap(use_orig_params=False).named_parameters()],
    differs="those of the model's parameters, with the prefix of wrapping (stock: `..._flat_param`)",
)
method(
    "named_buffers",
    "names outside and inside `summon_full_params`",
    lambda engine: outside_and_inside(engine, lambda model: model.named_buffers()),
)

for _kind in ("FULL", "SHARDED", "LOCAL"):

    @method("set_state_dict_type", f"`{_kind}_STATE_DICT`: names and types of `state_dict()`, and the previous type")
    def _(engine: Engine, kind: str = _kind) -> Any:
        model = engine.wrap(use_orig_params=False)
        before = engine.fsdp.set_state_dict_type(model, engine.api.StateDictType[f"{kind}_STATE_DICT"])
        return types(model.state_dict()), before.state_dict_type.name, type(before.state_dict_config).__name__

    @method("state_dict", f"`{_kind}_STATE_DICT` with `use_orig_params=True`: names and types")
    def _(engine: Engine, kind: str = _kind) -> Any:
        model = engine.wrap()
        with engine.of_type(kind, model):
            return types(model.state_dict())

    @method("state_dict_type", f"`{_kind}_STATE_DICT`: a state dict loads into another model")
    def _(engine: Engine, kind: str = _kind) -> Any:
        model, other = engine.wrap(use_orig_params=False), engine.wrap(build(1), use_orig_params=False)
        with engine.of_type(kind, model):
            state = model.state_dict()
        with engine.of_type(kind, other):
            other.load_state_dict(state)
        return engine.state(other)


@method("state_dict_type", "a configuration of another type")
def _(engine: Engine) -> Any:
    names, model = engine.api, engine.wrap()
    with engine.fsdp.state_dict_type(model, names.StateDictType.FULL_STATE_DICT, names.ShardedStateDictConfig()):
        return "accepted"


@method("state_dict_type", "the type after an exception inside", differs="the old one (stock: the new one)")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with contextlib.suppress(ZeroDivisionError), engine.of_type("SHARDED", model):
        raise ZeroDivisionError
    return engine.fsdp.get_state_dict_type(model).state_dict_type.name


@method("get_state_dict_type", "units with different types")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    engine.fsdp.set_state_dict_type(model.blocks[0], engine.api.StateDictType.SHARDED_STATE_DICT)
    return engine.fsdp.get_state_dict_type(model)


@method("summon_full_params", "values, shapes and names")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with engine.fsdp.summon_full_params(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


for _writeback in (True, False):

    @method("summon_full_params", f"`writeback={_writeback}`: in-place changes afterwards")
    def _(engine: Engine, writeback: bool = _writeback) -> Any:
        model = engine.wrap()
        with engine.fsdp.summon_full_params(model, writeback=writeback), torch.no_grad():
            model.out.weight.fill_(3.0)
        return engine.state(model)


@method("summon_full_params", "`writeback=True` and `rank0_only=True`")
def _(engine: Engine) -> Any:
    with engine.fsdp.summon_full_params(engine.wrap(), writeback=True, rank0_only=True):
        return "accepted"


@method("summon_full_params", "inside itself")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with contextlib.redirect_stderr(None), engine.fsdp.summon_full_params(model), engine.fsdp.summon_full_params(model):
        return "accepted"


@method("summon_full_params", "`recurse=False`")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with engine.fsdp.summon_full_params(model, recurse=False):
        return tuple(model.module.out.weight.shape), type(model.module.out.weight).__name__


method("summon_full_params", "`with_grads=True`", lambda engine: engine.after("backward"))
method(
    "summon_full_params",
    "`with_grads=True` and `use_orig_params=False`",
    lambda engine: types(engine.gradients(engine.after_backward(use_orig_params=False))),
    differs="gives gradients (stock: NotImplementedError)",
)
method(
    "summon_full_params",
    "`with_grads=True`: gradients of frozen parameters",
    lambda engine: (
        engine.gradients(engine.after_backward(model=with_frozen("inp.weight"), auto_wrap_policy=None))["inp.weight"]
        is None
    ),
    differs="None (stock: zeros, if others of the unit have gradients)",
)


@method("summon_full_params", "`parameter.data = ...` inside", differs="is written back (stock drops it)")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    with engine.fsdp.summon_full_params(model):
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
    return engine.state(model)


for _strategy in ("FULL_SHARD", "NO_SHARD"):

    @method("summon_full_params", f"changes between forward and backward, with `{_strategy}`")
    def _(engine: Engine, strategy: str = _strategy) -> Any:
        model = engine.wrap(strategy=strategy)
        loss = loss_of(model, engine.rank, 0)
        with engine.fsdp.summon_full_params(model), torch.no_grad():
            model.out.weight.mul_(2)
        loss.backward()
        return engine.gradients(model)


method(
    "no_sync",
    "accumulation: gradients after the synchronised backward",
    lambda engine: engine.after("no_sync", "backward"),
)
method(
    "no_sync",
    "`optimizer.zero_grad()` after a backward inside",
    lambda engine: engine.after("no_sync", "optimizer.zero_grad", "backward"),
    differs="keeps the gradient of that backward (stock drops it); call `model.zero_grad()`",
)
method(
    "no_sync",
    "`model.zero_grad()` after a backward inside",
    lambda engine: engine.after("no_sync", "model.zero_grad", "backward"),
)
method(
    "no_sync",
    "`model.zero_grad()` after a synchronised backward and one inside",
    lambda engine: engine.after("backward", "no_sync", "model.zero_grad", "backward"),
    differs="drops both gradients (stock keeps the synchronised one)",
)


@method(
    "no_sync",
    "the type of `parameter.grad` after a backward inside",
    differs="None (stock: this rank's whole gradient)",
)
def _(engine: Engine) -> Any:
    model = engine.wrap(nn.Linear(4, 4), auto_wrap_policy=None)
    with model.no_sync():
        model(batch(engine.rank, 0)[0]).sum().backward()
    return [type(parameter.grad).__name__ for parameter in model.parameters()]


@method("no_sync", "on a unit below the root")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    model(batch(engine.rank, 0)[0])
    with model.blocks[0].no_sync():
        return "accepted"


for _norm in (2.0, 1.0, float("inf")):

    @method("clip_grad_norm_", f"norm {_norm:g}: the norm and the gradients")
    def _(engine: Engine, norm: float = _norm) -> Any:
        model = engine.after_backward()
        return model.clip_grad_norm_(0.05, norm), engine.gradients(model)


_NAME = "clip_grad_norm_"
method(_NAME, "on a unit below the root", lambda engine: engine.after_backward().blocks[0].clip_grad_norm_(0.05))
method(
    _NAME,
    "without gradients: warns, gives zero",
    lambda engine: warning_of("no gradients", lambda: engine.wrap().clip_grad_norm_(0.05)),
)


def momentum(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value["momentum_buffer"] for name, value in sorted(state["state"].items())}


def full_state(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return engine.fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)


method("full_optim_state_dict", "names and values", lambda engine: momentum(full_state(engine, *engine.stepped())))


@method("full_optim_state_dict", "groups of parameters")
def _(engine: Engine) -> Any:
    groups = full_state(engine, *engine.stepped())["param_groups"]
    return [(group["lr"], group["momentum"], sorted(group["params"])) for group in groups]


@method("full_optim_state_dict", "on ranks whose optimizers list parameters in another order")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS["momentum"](parameters if engine.rank == 0 else parameters[::-1])
    engine.trained(model, optimizer)
    return momentum(full_state(engine, model, optimizer))


@method("sharded_optim_state_dict", "names and types")
def _(engine: Engine) -> Any:
    model, optimizer = engine.stepped()
    with engine.of_type("SHARDED", model):
        return types(momentum(engine.fsdp.sharded_optim_state_dict(model, optimizer)))


def reloads(name: str) -> Any:
    """A case of a conversion `convert(engine, first, model, optimizer)`: training goes on with its state.

    `first` are a model and its optimizer, `model` and `optimizer` those that go on with the weights and the state.
    """

    def decorate(convert: Callable[..., Any]) -> None:
        @method(name, "training goes on")
        def _(engine: Engine) -> Any:
            first = engine.stepped()
            model = engine.wrap(build(1))
            model.load_state_dict(engine.state(first[0]))
            optimizer = OPTIMIZERS["momentum"](model.parameters())
            optimizer.load_state_dict(convert(engine, first, model, optimizer))
            return engine.trained(model, optimizer)

    return decorate


@reloads("shard_full_optim_state_dict")
def _(engine: Engine, first: Any, model: Any, optimizer: Any) -> Any:
    return engine.fsdp.shard_full_optim_state_dict(full_state(engine, *first), model, optim=optimizer)


@reloads("scatter_full_optim_state_dict")
def _(engine: Engine, first: Any, model: Any, optimizer: Any) -> Any:
    state = engine.fsdp.full_optim_state_dict(*first)
    return engine.fsdp.scatter_full_optim_state_dict(state if engine.rank == 0 else None, model, optim=optimizer)


@reloads("flatten_sharded_optim_state_dict")
def _(engine: Engine, first: Any, model: Any, optimizer: Any) -> Any:
    with engine.of_type("SHARDED", first[0]), engine.of_type("SHARDED", model):
        state = engine.fsdp.sharded_optim_state_dict(*first)
        return engine.fsdp.flatten_sharded_optim_state_dict(state, model, optimizer)


method(
    "optim_state_dict",
    "FULL: names and values",
    lambda engine: momentum(engine.fsdp.optim_state_dict(*engine.stepped())),
)


@method(
    "optim_state_dict",
    "tensors of NO_SHARD, after the next step",
    differs="copies, which stay (stock: the optimizer's own tensors)",
)
def _(engine: Engine) -> Any:
    model, optimizer = engine.stepped(strategy="NO_SHARD")
    state = momentum(engine.fsdp.optim_state_dict(model, optimizer))
    before = {name: value.clone() for name, value in state.items()}
    engine.trained(model, optimizer)
    return [torch.equal(before[name], state[name]) for name in before]


@reloads("optim_state_dict_to_load")
def _(engine: Engine, first: Any, model: Any, optimizer: Any) -> Any:
    return engine.fsdp.optim_state_dict_to_load(model, optimizer, engine.fsdp.optim_state_dict(*first))


@method(
    "optim_state_dict_to_load",
    "groups that hold other parameters than in the state dict",
    refused="ValueError with the names (stock swaps state of one shape)",
    error="which the optimizer has in another group",
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


@method("rekey_optim_state_dict", "names for numbers")
def _(engine: Engine) -> Any:
    model = build()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    engine.trained(model, optimizer)
    names = engine.api.OptimStateKeyType.PARAM_NAME
    state = engine.fsdp.rekey_optim_state_dict(optimizer.state_dict(), names, model, optim=optimizer)
    return list(state["state"]), [group["params"] for group in state["param_groups"]]


def hooked(engine: Engine, times: int) -> Any:
    model = engine.wrap()
    for _ in range(times):
        model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)
    return engine.trained(model)


_NAME = "register_comm_hook"
method(_NAME, "torch's `allreduce_hook` and `reduce_scatter_hook`", lambda engine: hooked(engine, 1))
method(_NAME, "a second one", lambda engine: hooked(engine, 2))
for _name in ("_flat_param", "_handle"):

    @method(
        _name,
        "of an FSDP module",
        refused="AttributeError, there is no flat parameter",
        error="there is no flat parameter here",
    )
    def _(engine: Engine, name: str = _name) -> Any:
        return type(getattr(engine.wrap(use_orig_params=False), name)).__name__


# -- writes of scripts -------------------------------------------------------------------------------------------------


@write(
    "parameter.data = ...",
    "outside `summon_full_params`",
    refused="RuntimeError in the next forward, `state_dict()` or `summon_full_params` (stock writes it back)",
    error="the data of parameter 'weight' was replaced",
)
def _(engine: Engine) -> Any:
    model = engine.layer()
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    return model(torch.ones(1, 8))


@write(
    "parameter.grad.data = ...",
    "before a step",
    refused="RuntimeError in the step (stock steps with it)",
    error="the data of the gradient of parameter 'weight' was replaced",
)
def _(engine: Engine) -> Any:
    model = engine.layer()
    model(torch.ones(1, 8)).sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data * 0
    return OPTIMIZERS["sgd"](model.parameters()).step()


@write("parameter.data.mul_(...)", "outside `summon_full_params`")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    return engine.state(model)


@write(
    "module.weight = nn.Parameter(...)",
    "a plain one in the place of a sharded one",
    differs="ValueError with the name (stock: RuntimeError)",
)
def _(engine: Engine) -> Any:
    model = engine.layer()
    model.module.weight = nn.Parameter(torch.ones(8, 8))
    return model(torch.ones(1, 8))


@write("module.weight.requires_grad_(False)", "between steps")
def _(engine: Engine) -> Any:
    model = engine.wrap()
    losses = engine.trained(model, OPTIMIZERS["momentum"](model.parameters()))
    for _, parameter in named_parameters(model):
        parameter.requires_grad_(False)
    with torch.no_grad():
        return losses, model(batch(engine.rank, 5)[0])


# -- the document ------------------------------------------------------------------------------------------------------


def rows(heading: str) -> str:
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
