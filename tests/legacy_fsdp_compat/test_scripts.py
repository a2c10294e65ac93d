"""Things that FSDP1 scripts do and stock lets them do: the same numbers, names and types as with stock."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import sharded_grad_scaler
from torch.distributed.optim import _NamedOptimizer

from tests.legacy_fsdp_compat.both import (
    CPU,
    OPTIMIZERS,
    OURS,
    STOCK,
    Setting,
    api,
    assert_same_tensors,
    batch,
    build,
    loss_of,
    train,
    whole_gradients,
    whole_state,
    wrap,
)
from tests.support import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


# -- optimizers --------------------------------------------------------------------------------------------------------


def built_before(rank: int, world_size: int, kind: str) -> None:
    """Also with a backward whose gradients are zeroed before the first step, which the optimizer must see."""
    seen = {}
    for engine in (STOCK, OURS):
        original = build()
        parameters = list(original.parameters())
        optimizer = OPTIMIZERS[kind]([{"params": parameters[:3], "lr": 0.1}, {"params": parameters[3:]}])
        del parameters
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model = wrap(engine, Setting(), original)
        loss_of(model, rank, 7).backward()
        losses = train(model, optimizer, rank, range(2))
        schedule.step()
        losses += train(model, optimizer, rank, range(2, 4))
        seen[engine] = {"losses": torch.tensor(losses), **whole_state(engine, model)}
    assert_same_tensors(seen[STOCK], seen[OURS], **TOLERANCE)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_optimizer_built_before_the_model_was_wrapped(kind: str):
    run_ranks(2, built_before, kind)


def built_and_used_before(rank: int, world_size: int) -> None:
    """Existing state is cut like the parameters. Stock's steps raise, so the reference is one process."""
    alone, original = build(), build()
    expected, optimizer = OPTIMIZERS["adam"](alone.parameters()), OPTIMIZERS["adam"](original.parameters())
    for model, its in ((alone, expected), (original, optimizer)):
        model(batch(0, 9)[0]).sum().backward()
        its.step()
        its.zero_grad()
    model = wrap(OURS, Setting(), original)
    state = copy.deepcopy(api(OURS).FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"])
    train(model, optimizer, rank, range(2))
    for step in range(2):
        expected.zero_grad()
        (sum(loss_of(alone, one, step) for one in range(world_size)) / world_size).backward()
        expected.step()
    names = [name for name, _ in alone.named_parameters()]
    seen = whole_state(OURS, model)
    assert_same_tensors(dict(alone.named_parameters()), {name: seen[name] for name in names}, **TOLERANCE)
    assert list(state) == names


def test_optimizer_that_has_stepped_before_the_model_was_wrapped():
    run_ranks(2, built_and_used_before)


def built_before_flat(rank: int, world_size: int) -> None:
    """With use_orig_params=False stock silently trains nothing."""
    original = build()
    optimizer = OPTIMIZERS["sgd"](original.parameters())
    model = wrap(STOCK, Setting(use_orig_params=False), original)
    before = whole_state(STOCK, model)
    train(model, optimizer, rank, range(1))
    assert_same_tensors(before, whole_state(STOCK, model), rtol=0, atol=0)
    original = build()
    optimizer = OPTIMIZERS["sgd"](original.parameters())
    with pytest.raises(RuntimeError, match=r"this SGD holds a plain tensor for parameter 'inp\.weight'"):
        train(wrap(OURS, Setting(use_orig_params=False), original), optimizer, rank, range(1))


def test_optimizer_built_before_flat_parameters():
    run_ranks(2, built_before_flat)


def named_optimizer(rank: int, world_size: int, in_groups: bool) -> None:
    """Its keys are the names of `named_parameters()`. Stock's own conversion raises KeyError for them."""
    fsdp, kinds = api(OURS).FSDP, api(OURS).StateDictType
    model = wrap(OURS, Setting())
    groups = [{"params": list(model.parameters())}] if in_groups else None
    optimizer = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, groups, module=model, lr=0.05)
    plain = torch.optim.Adam(model.parameters(), lr=0.05)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    with fsdp.state_dict_type(model, kinds.SHARDED_STATE_DICT):
        state = fsdp.optim_state_dict(model, optimizer)
        assert next(iter(state["state"])) == "inp.weight"
        before = {name: value["exp_avg"].to_local().clone() for name, value in optimizer.state_dict()["state"].items()}
        loadable = fsdp.optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True)
        for one in optimizer.state.values():
            one["exp_avg"].zero_()
        optimizer.load_state_dict(loadable)
        after = {name: value["exp_avg"].to_local() for name, value in optimizer.state_dict()["state"].items()}
        assert_same_tensors(before, after, rtol=0, atol=0)
        plain.load_state_dict(fsdp.optim_state_dict_to_load(model, plain, state))
        assert_same_tensors(
            {str(index): value for index, value in enumerate(before.values())},
            {str(index): value["exp_avg"].to_local() for index, value in enumerate(plain.state.values())},
        )


@pytest.mark.parametrize("in_groups", [False, True])
def test_optimizer_that_goes_by_names(in_groups: bool):
    run_ranks(2, named_optimizer, in_groups)


# -- arguments ---------------------------------------------------------------------------------------------------------


def device_as_a_string(rank: int, world_size: int) -> None:
    for engine in (STOCK, OURS):
        model = api(engine).FSDP(build(), device_id="cpu")
        assert model.compute_device == CPU
        model(batch(rank, 0)[0]).sum().backward()


def test_device_id_as_a_string():
    run_ranks(2, device_as_a_string)


def everything_ignored(rank: int, world_size: int, argument: str) -> None:
    seen = {}
    for engine in (STOCK, OURS):
        original = build()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = api(engine).FSDP(original, device_id="cpu", use_orig_params=True, **{argument: [original]})
        assert any("ignor" in str(one.message) for one in caught)
        model(batch(rank, 0)[0]).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        seen[engine] = {name: parameter.detach() for name, parameter in model.named_parameters()}
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        assert list(model.state_dict()) == list(original.state_dict())
    assert_same_tensors(seen[STOCK], seen[OURS], rtol=0, atol=0)


@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
def test_the_root_is_ignored(argument: str):
    run_ranks(2, everything_ignored, argument)


def losses_to_scale(rank: int, world_size: int) -> None:
    seen = []
    for kind in (sharded_grad_scaler.ShardedGradScaler, api(OURS).ShardedGradScaler):
        scaler = kind("cpu", 4.0)
        half, other = torch.tensor(1.5, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)
        scaled = [scaler.scale(half), *scaler.scale([half, other]), *scaler.scale((torch.tensor(2.0),))]
        assert isinstance(scaler.scale((half,)), tuple)
        assert next(iter(scaler.scale(iter([half])))).dtype == torch.float16
        with pytest.raises(ValueError, match="outputs must be"):
            scaler.scale(3)
        seen.append([(value.dtype, value.tolist()) for value in scaled])
    assert seen[0] == seen[1]


def test_scaled_losses_keep_their_dtype():
    run_ranks(1, losses_to_scale)


def mesh_without_names(rank: int, world_size: int, named: bool) -> None:
    """SHARDED state dicts hold DTensors on the very mesh that the script made."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("here", "there") if named else None)
    seen = {}
    for engine in (STOCK, OURS):
        names = api(engine)
        model = wrap(engine, Setting("HYBRID_SHARD", policy=False), device_mesh=mesh)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        losses = train(model, optimizer, rank, range(2))
        with names.FSDP.state_dict_type(model, names.StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            optim = names.FSDP.optim_state_dict(model, optimizer)["state"]
            for value in (state["inp.weight"], optim["inp.weight"]["momentum_buffer"]):
                assert value.device_mesh is mesh or value.device_mesh == mesh
                assert value.device_mesh.mesh_dim_names == mesh.mesh_dim_names
            model.load_state_dict(state)
            names.FSDP.optim_state_dict_to_load(model, optimizer, {"state": optim})
        seen[engine] = {"losses": torch.tensor(losses), **whole_state(engine, model)}
    assert_same_tensors(seen[STOCK], seen[OURS], **TOLERANCE)


@pytest.mark.parametrize("named", [False, True])
def test_two_dimensional_mesh(named: bool):
    run_ranks(4, mesh_without_names, named)


# -- wrapping again ----------------------------------------------------------------------------------------------------


def another_root(rank: int, world_size: int) -> None:
    """A unit that has run below one root is put below a second one; both are used in turn."""
    seen = {}
    for engine in (STOCK, OURS):
        fsdp = api(engine).FSDP
        torch.manual_seed(0)
        arguments = {"use_orig_params": True, "device_id": CPU}
        shared, heads = fsdp(nn.Linear(4, 4), **arguments), [nn.Linear(4, 4), nn.Linear(4, 4)]
        roots = []
        for head in heads:
            roots.append(fsdp(nn.Sequential(shared, head), **arguments))
            roots[-1](batch(rank, 0)[0]).square().sum().backward()
        for step in range(1, 3):
            for root in roots:
                root(batch(rank, step)[0]).square().sum().backward()
        seen[engine] = {f"{i}.{n}": g for i, root in enumerate(roots) for n, g in whole_gradients(engine, root).items()}
    assert_same_tensors(seen[STOCK], seen[OURS], **TOLERANCE)


def test_a_unit_below_two_roots():
    run_ranks(2, another_root)


def used_before_wrapping(rank: int, world_size: int) -> None:
    """These calls do not make a unit a root: a module may still be wrapped around it."""
    for use in ("summon_full_params", "state_dict", "apply", "optim_state_dict"):
        fsdp = api(OURS).FSDP
        model = build()
        unit = model.blocks[0] = fsdp(model.blocks[0], use_orig_params=True, device_id=CPU)
        if use == "summon_full_params":
            with fsdp.summon_full_params(unit):
                pass
        elif use == "optim_state_dict":
            fsdp.optim_state_dict(unit, torch.optim.SGD(unit.parameters(), lr=0.1))
        else:
            getattr(unit, use)(*([lambda module: None] if use == "apply" else []))
        root = fsdp(model, use_orig_params=True, device_id=CPU)
        loss_of(root, rank, 0).backward()
        assert root.check_is_root()
        assert not unit.check_is_root()


def test_units_that_were_used_before():
    run_ranks(2, used_before_wrapping)


class Stage(nn.Module):
    """Each rank has another name for its first layer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.own = f"stage{rank}"
        setattr(self, self.own, nn.Linear(4, 6))
        self.common = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.common(getattr(self, self.own)(x))


def names_by_rank(rank: int, world_size: int) -> None:
    seen = {}
    for engine in (STOCK, OURS):
        names = api(engine)
        torch.manual_seed(0)
        policy = names.ModuleWrapPolicy({nn.Linear})
        model = wrap(engine, Setting(policy=False), Stage(rank), auto_wrap_policy=policy)
        losses = train(model, OPTIMIZERS["adam"](model.parameters()), rank, range(3))
        seen[engine] = {"losses": torch.tensor(losses), **whole_state(engine, model)}
        assert f"stage{rank}.weight" in seen[engine]
    assert_same_tensors(seen[STOCK], seen[OURS], **TOLERANCE)


def test_names_that_depend_on_the_rank():
    run_ranks(2, names_by_rank)


# -- attributes that scripts read --------------------------------------------------------------------------------------


def decayed(model: nn.Module) -> tuple[set[str], set[str]]:
    """The filter of many scripts: names from a walk over modules, looked up among `named_parameters()`."""
    decay: set[str] = set()
    for module_name, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if name.endswith("weight") and isinstance(module, nn.Linear):
                decay.add(f"{module_name}.{name}" if module_name else name)
    known = dict(model.named_parameters())
    return {name for name in decay if name in known}, known.keys() - decay


def names_of_parameters(rank: int, world_size: int) -> None:
    seen = {}
    for engine in (STOCK, OURS):
        fsdp = api(engine).FSDP
        model = wrap(engine, Setting())
        outside = [name for name, _ in model.named_parameters()], [name for name, _ in model.named_buffers()]
        part = [name for name, _ in model.module.blocks[0].named_parameters(prefix="x")]
        with fsdp.summon_full_params(model):
            inside = [name for name, _ in model.named_parameters()], [name for name, _ in model.named_buffers()]
            of_module = [name for name, _ in model.module.named_parameters()]
        seen[engine] = outside, part, inside, of_module, decayed(model)
    assert seen[OURS] == seen[STOCK]
    assert len(seen[OURS][-1][0]) == 6


def test_names_of_parameters():
    run_ranks(2, names_of_parameters)


def types_and_attributes(rank: int, world_size: int) -> None:
    seen: dict[str, Any] = {}
    for engine in (STOCK, OURS):
        fsdp = api(engine).FSDP
        model: Any = wrap(engine, Setting())
        model(batch(rank, 0)[0]).sum().backward()
        assert isinstance(model.params, list)
        assert all(isinstance(parameter, nn.Parameter) for parameter in model.params)
        seen[engine] = (
            type(model) is fsdp,
            isinstance(model, stock_fsdp.FSDPModule),
            [type(one).__name__ for one in model.modules()],
            repr(model),
            [sum(one is parameter for parameter in model.parameters()) for one in model.params] != [],
            model.double() is model,
            {parameter.dtype for parameter in model.parameters()},
        )
    assert seen[OURS] == seen[STOCK]


def test_types_and_attributes():
    run_ranks(2, types_and_attributes)


def not_copied(rank: int, world_size: int) -> None:
    model = wrap(OURS, Setting())
    with pytest.raises(RuntimeError, match="cannot be deep-copied"):
        copy.deepcopy(model)


def test_deepcopy_is_refused():
    run_ranks(1, not_copied)
