"""Optimizer steps on plain shards: the same bits as steps on DTensors, and nothing else to be seen of them."""

import copy
import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardkit.core import fully_shard, optimizer_step_on_shards
from tests.support import rank_mesh, run_ranks

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"foreach": True, "amsgrad": True}),
    ("AdamW", {"foreach": False}),
    ("AdamW", {"fused": True}),
    ("Adam", {"foreach": True, "weight_decay": 0.1}),
    ("SGD", {"foreach": True, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"foreach": False}),
    ("Adagrad", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("NAdam", {"lr": 1e-2}),
    ("RAdam", {}),
    ("ASGD", {}),
]


class _Net(nn.Module):
    """Uneven and empty shards, a 0-dim parameter, one that is frozen and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()) * self.scale


Change: TypeAlias = Callable[[_Net, torch.optim.Optimizer], None]


def _model(world_size: int) -> _Net:
    torch.manual_seed(0)
    model = _Net()
    fully_shard(model.first, mesh=rank_mesh((world_size,)))
    return fully_shard(model, mesh=rank_mesh((world_size,)))


def _optimizer(model: nn.Module, name: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.02}, {"params": others}]
    return getattr(torch.optim, name)(groups, **({"lr": 0.05} | options))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _same(ours: Any, theirs: Any, where: str) -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, DTensor):
        assert ours.placements == theirs.placements, where
        assert ours.shape == theirs.shape, where
        assert torch.equal(ours.to_local(), theirs.to_local()), where
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            _same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list):
        for index, pair in enumerate(itertools.zip_longest(ours, theirs)):
            _same(*pair, f"{where}.{index}")
    else:
        assert ours == theirs, where


def _steps_alike(rank: int, world_size: int, name: str, options: dict[str, Any]) -> None:
    models = [_model(world_size), _model(world_size)]
    optimizers = [_optimizer(model, name, options) for model in models]
    optimizer_step_on_shards(optimizers[0])
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            _step(model, optimizer, seed=10 * step + rank)
        if step == 1:  # a loaded state is used, and is not shared with its source
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        _same(dict(models[0].state_dict()), dict(models[1].state_dict()), f"step {step}")
        _same(optimizers[0].state_dict(), optimizers[1].state_dict(), f"step {step}")
    held = [parameter for group in optimizers[0].param_groups for parameter in group["params"]]
    assert all(ours is theirs for ours, theirs in zip(held, models[0].parameters(), strict=True))


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)
def test_the_same_bits_as_on_dtensors(name: str, options: dict[str, Any]) -> None:
    for world_size in (1, 3) if name in ("AdamW", "SGD") and not options.get("fused") else (3,):
        run_ranks(world_size, _steps_alike, name, options)


def _replace_gradient(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    model.second.weight.grad = model.second.weight.grad * 2


def _remove_gradient(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    model.second.weight.grad = None


def _add_gradient(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    model.unused.grad = torch.ones_like(model.unused)


def _replace_state(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[model.second.weight]
    state["exp_avg"] = state["exp_avg"] * 2


def _exchange_states(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    weight, bias = (optimizer.state[one] for one in (model.first.weight, model.second.weight))
    weight["step"], bias["step"] = bias["step"] + 3, weight["step"]


def _remove_state(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[model.second.weight]


def _remove_parameter(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[optimizer.param_groups[1]["params"].pop(1)]


def _exchange_parameters(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    few, many = (group["params"] for group in optimizer.param_groups)
    few[0], many[1] = many[1], few[0]


def _move_parameter(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(1))


def _move_memory(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    model.double()
    model.float()


def _fail(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.02


def _turn_momentum_on(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["momentum"] = 0.9


def _be_refused(parameter: torch.Tensor, gradient: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    before, parameter.grad = parameter.grad, gradient
    if "step" in vars(optimizer):  # by optimizer_step_on_shards
        with pytest.raises(RuntimeError, match="has a gradient with"):
            optimizer.step()
    parameter.grad = before


def _replicate_gradient(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    weight = model.second.weight
    _be_refused(weight, weight.grad.redistribute(placements=[Replicate()]), optimizer)


def _assign_plain_gradient(model: _Net, optimizer: torch.optim.Optimizer) -> None:
    _be_refused(model.unused, torch.ones(3), optimizer)


_BETWEEN_STEPS = [
    _replace_gradient,
    _remove_gradient,
    _add_gradient,
    _replace_state,
    _exchange_states,
    _remove_state,
    _remove_parameter,
    _exchange_parameters,
    _move_parameter,
    _move_memory,
    _fail,
    _turn_momentum_on,
    _replicate_gradient,
    _assign_plain_gradient,
]


def _steps_after(rank: int, world_size: int, change: Change) -> None:
    models = [_model(world_size), _model(world_size)]
    name = "SGD" if change is _turn_momentum_on else "AdamW"
    optimizers = [_optimizer(model, name, {"foreach": True}) for model in models]
    optimizer_step_on_shards(optimizers[0])
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            if step == 3:  # the second and the third step were alike
                change(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        _same(dict(models[0].state_dict()), dict(models[1].state_dict()), f"step {step}")
        _same(optimizers[0].state_dict(), optimizers[1].state_dict(), f"step {step}")


@pytest.mark.parametrize("change", _BETWEEN_STEPS, ids=lambda change: change.__name__)
def test_the_same_bits_after_a_change_between_steps(change: Change) -> None:
    run_ranks(2, _steps_after, change)


def _scaled_steps(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """A gradient that overflows, so that its step is skipped, and parameters that come later."""
    models, scales = [_model(world_size), _model(world_size)], []
    optimizers = [torch.optim.AdamW(model.first.parameters(), lr=0.05, **options) for model in models]
    optimizer_step_on_shards(optimizers[0])
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in models]
    for step in range(4):
        before = [parameter.to_local().clone() for parameter in models[0].parameters()]
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            if step == 2:
                optimizer.add_param_group({"params": [*model.second.parameters(), model.scale], "lr": 0.1})
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(x).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
        after = [parameter.to_local() for parameter in models[0].parameters()]
        assert (step == 1) == all(map(torch.equal, before, after)), step
        _same(dict(models[0].state_dict()), dict(models[1].state_dict()), f"step {step}")
        _same(optimizers[0].state_dict(), optimizers[1].state_dict(), f"step {step}")
        scales.append([scaler.get_scale() for scaler in scalers])
    assert scales == [[2.0**10] * 2, [2.0**9] * 2, [2.0**9] * 2, [2.0**10] * 2]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_scaled_gradients_and_parameters_that_are_added(options: dict[str, Any]) -> None:
    run_ranks(2, _scaled_steps, options)


def _steps_with_what_dtensors_lack(
    rank: int, world_size: int, name: str, options: dict[str, Any]
) -> list[torch.Tensor]:
    model = _model(world_size)
    optimizer = _optimizer(model, name, options)
    optimizer_step_on_shards(optimizer)
    for step in range(3):
        _step(model, optimizer, seed=step)
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("name", "options"), [("SGD", {"momentum": 0.9, "fused": True}), ("Rprop", {})])
def test_optimizers_without_dtensor_strategies_work(name: str, options: dict[str, Any]) -> None:
    # With DTensors torch refuses both.
    alone = run_ranks(1, _steps_with_what_dtensors_lack, name, options)[0]
    for ranks in run_ranks(2, _steps_with_what_dtensors_lack, name, options):
        for seen, expected in zip(ranks, alone, strict=True):
            torch.testing.assert_close(seen, expected)


def _around_a_step(rank: int, world_size: int) -> None:
    model = _model(world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[bool] = []

    def look(*_: object) -> None:
        seen.append(_holds_dtensors(optimizer))

    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(look)
    optimizer_step_on_shards(optimizer)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(look)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    _step(model, optimizer, 0)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert seen == [True] * 4
    assert all(p.grad is None for p in model.parameters())
    before = [p.to_local().clone() for p in model.parameters()]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    assert any(not torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))


def _holds_dtensors(optimizer: torch.optim.Optimizer) -> bool:
    return all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


def test_hooks_schedulers_and_closures_see_dtensors() -> None:
    run_ranks(2, _around_a_step)


def _fails(rank: int, world_size: int) -> None:
    model = _model(world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer_step_on_shards(optimizer)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    assert _holds_dtensors(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert _holds_dtensors(optimizer)


def test_a_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
    run_ranks(2, _fails)


def _gathers_what_was_stepped(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4), mesh=rank_mesh((world_size,)), reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer_step_on_shards(optimizer)
    model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4))  # unsharded while the optimizer steps
    optimizer.step()
    output = model(torch.ones(2, 4))
    model.reshard()
    weight, bias = (parameter.full_tensor() for parameter in model.parameters())
    return output.detach(), nn.functional.linear(torch.ones(2, 4), weight, bias).detach()


def test_a_step_is_seen_by_the_next_forward() -> None:
    for seen, expected in run_ranks(2, _gathers_what_was_stepped):
        assert torch.equal(seen, expected)


def test_optimizers_that_read_whole_parameters_are_refused() -> None:
    class Mine(torch.optim.SGD):
        pass

    parameter = nn.Parameter(torch.ones(2))
    for optimizer in (Mine([parameter], lr=0.1), torch.optim.LBFGS([parameter])):
        with pytest.raises(TypeError, match=type(optimizer).__name__ + " is not known to update each element"):
            optimizer_step_on_shards(optimizer)


def _prepared_twice(rank: int, world_size: int) -> None:
    model = _model(world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer_step_on_shards(optimizer)
    optimizer_step_on_shards(optimizer)
    for step in range(3):
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        _step(model, optimizer, seed=step)
        after = [parameter.to_local() for parameter in model.parameters()]
        changed = torch.tensor(sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        torch.distributed.all_reduce(changed)
        assert changed > 0, step
        assert _holds_dtensors(optimizer)


def test_a_second_call_changes_nothing() -> None:
    run_ranks(2, _prepared_twice)


def _partial_gradient(rank: int, world_size: int) -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2), rank_mesh((world_size,)), [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(2), rank_mesh((world_size,)), [Partial()])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer_step_on_shards(optimizer)
    with pytest.raises(RuntimeError, match=r"shape \(2,\) with placements \(Replicate\(\),\) has a gradient with"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [parameter]


def test_a_gradient_with_other_placements_is_refused() -> None:
    run_ranks(2, _partial_gradient)


def _loads(rank: int, world_size: int) -> bool:
    model = _model(world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer_step_on_shards(optimizer)
    for step in range(3):
        _step(model, optimizer, step)
    old = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"]._local_tensor)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return old() is None


def _drops_gradients(rank: int, world_size: int) -> list[bool]:
    model = _model(world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer_step_on_shards(optimizer)
    dropped = []
    for _ in range(3):
        model(torch.ones(2, 5)).sum().backward()
        gradient = weakref.ref(model.first.weight.grad._local_tensor)
        optimizer.step()
        optimizer.zero_grad()
        dropped.append(gradient() is None)
    return dropped


def _what_a_step_holds(rank: int, world_size: int, replaced: str) -> list[int]:
    """How many tensors of the step before are alive in a step whose parameters or states have been replaced."""
    model = _model(world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer_step_on_shards(optimizer)
    for step in range(3):
        _step(model, optimizer, step)
    states = optimizer.state.values()
    tensors = [*model.parameters(), *(state["exp_avg"] for state in states)]
    before = [weakref.ref(one._local_tensor) for one in tensors if one._local_tensor.numel()]
    if replaced == "parameters":
        before = before[: sum(bool(one._local_tensor.numel()) for one in model.parameters())]
        model.double()
        model.float()
    else:
        before = before[sum(bool(one._local_tensor.numel()) for one in model.parameters()) :]
        for state in states:
            state["exp_avg"] = state["exp_avg"].clone()
    del tensors
    alive: list[int] = []
    prepare = optimizer._init_group

    def look(*arguments: Any) -> Any:
        alive.append(sum(one() is not None for one in before))
        return prepare(*arguments)

    optimizer._init_group = look  # type: ignore[method-assign]
    _step(model, optimizer, 3)
    assert before
    return alive


@pytest.mark.parametrize("replaced", ["parameters", "states"])
def test_a_step_holds_nothing_that_was_replaced_before_it(replaced: str) -> None:
    assert run_ranks(2, _what_a_step_holds, replaced) == [[0], [0]]


def test_gradients_are_freed_when_the_user_drops_them() -> None:
    assert run_ranks(2, _drops_gradients) == [[True] * 3] * 2


def test_a_loaded_state_takes_the_place_of_the_old_one_at_once() -> None:
    assert run_ranks(2, _loads) == [True, True]
