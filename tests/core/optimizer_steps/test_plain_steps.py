"""Optimizer steps on plain tensors: the bits of one process, or of steps on DTensors, and nothing else to be seen."""

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode

from shardkit.core import Blocks, Owned, fully_shard, optimizer_step_on_shards, plan_owners
from shardkit.core.torch_compat import local_of
from tests.core.optimizer_steps.placed_training import (
    ELEMENTWISE,
    Layers,
    backward_alike,
    check,
    loss_of,
    matrices,
    optimizer_for,
    shard_layers,
    step,
)
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed
from tests.support.twins import assert_equal

# -- on any shard: the same as on DTensors ---------------------------------------------------------------------------


def odd() -> Any:
    """Uneven and empty shards, a 0-dim parameter, one that is frozen and one that gets no gradient."""
    torch.manual_seed(0)
    run = lambda module, x: module.second(module.first(x).relu()) * module.scale  # noqa: E731
    scale, unused = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(3))
    model = Composed(run, first=nn.Linear(5, 7), second=nn.Linear(7, 1), scale=scale, unused=unused)
    model.first.bias.requires_grad_(False)
    return model


class Pair:
    """Two models that train alike, the first one's optimizer on plain shards."""

    def __init__(self, world_size: int, name: str, options: dict[str, Any]) -> None:
        self.models, self.optimizers = [], []
        for _ in range(2):
            model, mesh = odd(), rank_mesh((world_size,))
            fully_shard(model.first, mesh=mesh)
            self.models.append(fully_shard(model, mesh=mesh))
            first, *others = model.parameters()
            groups = [{"params": [first], "lr": 0.02}, {"params": others}]
            self.optimizers.append(getattr(torch.optim, name)(groups, **({"lr": 0.05} | options)))
        optimizer_step_on_shards(self.optimizers[0])
        optimizer_step_on_shards(self.optimizers[0])  # changes nothing

    def step(self, seed: int, change: Callable[[Any, Any], None] | None = None) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            if change is not None:
                change(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    def check(self, where: object) -> None:
        assert_equal(*(dict(model.state_dict()) for model in self.models), f"{where}")
        assert_equal(*(optimizer.state_dict() for optimizer in self.optimizers), f"{where}")


@pytest.mark.parametrize(
    ("world_size", "name", "options"), [(1, "AdamW", {"foreach": True}), *((3, *each) for each in ELEMENTWISE)], ids=str
)
@on_ranks()
def test_the_same_bits_as_on_dtensors(rank: int, world_size: int, name: str, options: dict[str, Any]) -> None:
    pair = Pair(world_size, name, options)
    for number in range(4):
        pair.step(seed=10 * number + rank)
        if number == 1:  # a loaded state is used, and is not shared with its source
            pair.optimizers[0].load_state_dict(copy.deepcopy(pair.optimizers[1].state_dict()))
        pair.check(number)
    held = [parameter for group in pair.optimizers[0].param_groups for parameter in group["params"]]
    assert all(ours is theirs for ours, theirs in zip(held, pair.models[0].parameters(), strict=True))


def _exchange_parameters(model: Any, optimizer: Any) -> None:
    few, many = (group["params"] for group in optimizer.param_groups)
    few[0], many[1] = many[1], few[0]


def _fail(model: Any, optimizer: Any) -> None:
    lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], "much"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = lr


def _be_refused(parameter: torch.Tensor, gradient: torch.Tensor, optimizer: Any) -> None:
    before, parameter.grad = parameter.grad, gradient
    if optimizer.defaults.get("on_shards"):
        with pytest.raises(RuntimeError, match="has a gradient with"):
            optimizer.step()
    parameter.grad = before


def _replicate_gradient(model: Any, optimizer: Any) -> None:
    weight = model.second.weight
    _be_refused(weight, weight.grad.redistribute(placements=[Replicate()]), optimizer)


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "another gradient": lambda model, optimizer: model.second.weight.grad.mul_(2),
    "no state": lambda model, optimizer: optimizer.state.pop(model.second.weight),
    "exchanged parameters": _exchange_parameters,
    "other memory": lambda model, optimizer: model.double().float(),
    "an error": _fail,
    "a replicated gradient": _replicate_gradient,
    "a plain gradient": lambda model, optimizer: _be_refused(model.unused, torch.ones(3), optimizer),
}


@on_ranks(2, timeout=120)
def test_the_same_bits_after_changes_between_steps(rank: int, world_size: int) -> None:
    pair = Pair(world_size, "AdamW", {"foreach": True})
    pair.optimizers[0].defaults["on_shards"] = True
    for number, (name, change) in enumerate(CHANGES.items()):
        pair.step(20 * number + rank)
        pair.step(20 * number + 10 + rank, change)
        pair.check(name)


@pytest.mark.parametrize(("name", "options"), [("SGD", {"momentum": 0.9, "fused": True}), ("Rprop", {})])
@on_ranks(2)
def test_optimizers_that_torch_refuses_on_dtensors(
    rank: int, world_size: int, name: str, options: dict[str, Any]
) -> None:
    model, reference = fully_shard(odd(), mesh=rank_mesh((world_size,))), odd()
    ours, theirs = (getattr(torch.optim, name)(one.parameters(), lr=0.05, **options) for one in (model, reference))
    optimizer_step_on_shards(ours)
    for number in range(3):
        step(model, ours, number)
        step(reference, theirs, number)
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), whole)


class OwnAdamW(torch.optim.AdamW):
    """A subclass may do anything, so shardkit does not take it for element-wise."""

    steps_each_parameter_alone = True


@on_ranks(2)
def test_optimizers_that_read_whole_parameters_are_refused(rank: int, world_size: int) -> None:
    bnb = pytest.importorskip("bitsandbytes.optim")
    for kind in (OwnAdamW, torch.optim.LBFGS, bnb.LAMB8bit, bnb.LARS8bit, bnb.AdEMAMix8bit):
        options = {"momentum": 0.9} if kind is bnb.LARS8bit else {}
        with pytest.raises(TypeError, match=f"{kind.__name__} is not known to update each element"):
            optimizer_step_on_shards(kind([nn.Parameter(torch.ones(2))], lr=0.1, **options))


# -- on Owned and Blocks: the same as in one process -----------------------------------------------------------------


class EveryOther(torch.optim.Optimizer):
    """Keeps a gradient in its state at one step, uses it and removes it at the next, and begins anew after eight."""

    steps_each_parameter_alone = True

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                if "kept" in state:
                    parameter.sub_(0.1 * (state.pop("kept") + parameter.grad))
                else:
                    state["kept"] = parameter.grad.clone()
                if state["count"] == 8:
                    del self.state[parameter]


OWNED: dict[str, dict[str, Any]] = {
    "tests.core.optimizer_steps.test_plain_steps.EveryOther": {},
    "torch.optim.Muon": {"lr": 0.02, "weight_decay": 0.1},
    "pytorch_optimizer.SOAP": {"precondition_frequency": 2},
}


def assert_alike(model: nn.Module, reference: nn.Module) -> None:
    """The matrices are those of one process, to the last bit."""
    for sharded, whole in zip(matrices(model), matrices(reference), strict=True):
        assert torch.equal(sharded.full_tensor(), whole)


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("kind", OWNED)
@on_ranks(1, 2, 3, 4, timeout=120)
def test_steps_on_whole_matrices_as_one_process_does(rank: int, world_size: int, kind: str) -> None:
    warnings.simplefilter("ignore")
    reference, model = Layers(), shard_layers(world_size, plan_owners(Layers()))
    start = [p.detach().clone() for p in matrices(reference)]
    ours, theirs = (optimizer_for(kind, matrices(one), **OWNED[kind]) for one in (model, reference))
    for number in range(12):
        backward_alike(model, reference, rank, number)
        with torch.compiler.set_stance("force_eager"):
            for optimizer in (ours, theirs):
                torch.manual_seed(number)
                with CommDebugMode() as counted:
                    optimizer.step()
                assert counted.get_total_counts() == 0
        assert_alike(model, reference)
        ours.zero_grad()
        theirs.zero_grad()
    assert not any(torch.equal(one, p) for one, p in zip(start, matrices(reference), strict=True))
    assert all(ours is theirs for ours, theirs in zip(ours.param_groups[0]["params"], matrices(model), strict=True))
    for p, whole in zip(matrices(model), matrices(reference), strict=True):
        if ours.state.get(p):
            assert ours.state[p].keys() == theirs.state[whole].keys()
        assert kind == "torch.optim.Muon" or bool(ours.state.get(p)) == bool(local_of(p).numel()), "with the owner"
        for value in ours.state.get(p, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == p.shape:
                assert isinstance(value, DTensor)
                assert value.placements == p.placements


class FailingMuon(torch.optim.Muon):
    steps_each_parameter_alone = True
    fails = False

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        if self.fails:
            raise ArithmeticError("planted")
        return super().step(closure)


@on_ranks(2)
def test_a_step_that_raises_leaves_the_next_ones_right(rank: int, world_size: int) -> None:
    model, reference = shard_layers(world_size, plan_owners(Layers())), Layers()
    ours, theirs = (FailingMuon(matrices(one), lr=0.02) for one in (model, reference))
    for number in range(3):
        for parameter in model.parameters():  # an earlier gradient would be added to
            assert number != 1 or parameter.ndim == 1 or parameter.grad is None
        backward_alike(model, reference, rank, number)
        for optimizer in (ours, theirs):
            optimizer.fails = number == 1
            try:
                optimizer.step()
            except ArithmeticError:
                assert number == 1
                optimizer.state_dict()
                assert all(isinstance(p, DTensor) or optimizer is theirs for p in optimizer.param_groups[0]["params"])
            optimizer.zero_grad()
    assert_alike(model, reference)


class Interleaved(torch.optim.Optimizer):
    """While it steps, another thread runs `meanwhile`."""

    steps_each_parameter_alone = True
    meanwhile: Callable[[], object]

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        thread = threading.Thread(target=self.meanwhile)
        thread.start()
        thread.join()
        for p in self.param_groups[0]["params"]:
            assert not isinstance(p, DTensor)
            if p.grad is not None:
                self.state[p]["sum"] = self.state[p].get("sum", 0) + p.grad
                p.add_(self.state[p]["sum"], alpha=-0.1)


@on_ranks(2)
def test_a_forward_in_another_thread_leaves_a_step_alone(rank: int, world_size: int) -> None:
    model, reference = shard_layers(world_size, plan_owners(Layers())), Layers()
    beside = fully_shard(nn.Linear(3, 3), mesh=rank_mesh((world_size,)))
    ours, theirs = (Interleaved(matrices(one)) for one in (model, reference))
    ours.meanwhile, theirs.meanwhile = lambda: beside(torch.ones(3)), lambda: None
    for number in range(2):
        backward_alike(model, reference, rank, number)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(model, reference)


@pytest.mark.parametrize("kind", ["Muon", "on shards", "nested"])
@on_ranks(2)
def test_a_closure_sees_the_parameters_themselves(rank: int, world_size: int, kind: str) -> None:
    choose = None if kind == "on shards" else plan_owners(Layers())
    model, reference = shard_layers(world_size, choose), Layers()
    make = {"Muon": torch.optim.Muon, "on shards": torch.optim.SGD, "nested": FailingMuon}[kind]
    # When these are made, torch calls hooks for the step of the base class, too.
    theirs = (torch.optim.SGD if kind == "on shards" else torch.optim.Muon)(matrices(reference), lr=0.02)
    ours = make(matrices(model), lr=0.02)
    if kind == "on shards":
        optimizer_step_on_shards(ours)
    for number in range(3):

        def closure() -> float:
            ours.zero_grad()
            backward_alike(model, reference, rank, number)  # noqa: B023
            return 1.5

        assert ours.step(closure) == 1.5
        theirs.step()
        assert_alike(model, reference)


def _clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-2)


@pytest.mark.parametrize("on_shards", [False, True])
@on_ranks(2)
def test_step_hooks_see_whole_norms(rank: int, world_size: int, on_shards: bool) -> None:
    reference, model = Layers(), shard_layers(world_size, None if on_shards else plan_owners(Layers()))
    ours, theirs = (torch.optim.SGD(matrices(one), lr=1.0) for one in (model, reference))
    seen: list[bool] = []
    if on_shards:
        optimizer_step_on_shards(ours)
    for optimizer in (ours, theirs):
        optimizer.register_step_pre_hook(_clip)
    for number in range(3):
        ours.register_step_post_hook(
            lambda one, *_: seen.extend(isinstance(p, DTensor) for p in one.param_groups[0]["params"])
        )
        backward_alike(model, reference, rank, number)
        ours.step()
        theirs.step()
        for sharded, whole in zip(matrices(model), matrices(reference), strict=True):
            torch.testing.assert_close(sharded.full_tensor(), whole)
    assert seen == [True] * 4 * (1 + 2 + 3)


class Nested(torch.optim.SGD):
    """Its step calls that of its base class, for which torch calls hooks, too; it may drop gradients, and looks."""

    steps_each_parameter_alone = True
    drops = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            assert not isinstance(parameter, DTensor)
            parameter.grad = None if self.drops else parameter.grad
        return result


@pytest.mark.parametrize("kind", ["owned", "on shards"])
@on_ranks(2)
def test_a_step_is_seen_by_the_next_forward(rank: int, world_size: int, kind: str) -> None:
    """Where parameters stay unsharded, all ranks have to gather them again, also those that stepped on nothing."""
    torch.optim.SGD([torch.ones(1)])
    model, reference = shard_layers(world_size, (lambda p: Owned(rank=0)) if kind == "owned" else None), Layers()
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    ours = (torch.optim.SGD if kind == "on shards" else Nested)(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    if kind == "on shards":
        optimizer_step_on_shards(ours)
    for number in range(3):
        losses = [loss_of(one, 0, number) for one in (model, reference)]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, (ours, theirs), strict=True):
            loss.backward()
            if number == 1:
                loss_of(model, 0, number)  # unsharded while the optimizer steps
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_an_optimizer_that_needs_matrices_refuses_blocks(rank: int, world_size: int) -> None:
    model = shard_layers(world_size, lambda p: Blocks(rows=4))
    loss_of(model, rank, 0).backward()
    with pytest.raises(NotImplementedError, match=r"Blocks\(rows=4\).*takes parameters on Owned\(\)"):
        torch.optim.Muon(matrices(model)).step()


# -- lists of parameters that torch's foreach and fused operators do not take together -------------------------------


def unmixed() -> Any:
    torch.manual_seed(1)
    first, second, third = nn.Linear(10, 12), nn.Linear(12, 10), nn.Linear(10, 10, bias=False)
    return Composed(None, first=first, second=second, third=third, gain=nn.Parameter(torch.tensor(0.3)))


MIXES: dict[str, Callable[[nn.Parameter], object]] = {
    "owned and shard": lambda p: Owned() if p.ndim == 2 else None,
    "rows and shard": lambda p: Blocks(rows=4) if p.ndim == 2 else None,
    "elements and owned": lambda p: Blocks(elements=7) if p.ndim == 2 else Owned(),
    "plain and shard": lambda p: None,
    "two meshes": lambda p: None,
}


def mixed(mix: str, world_size: int) -> nn.Module:
    model, mesh = unmixed(), rank_mesh((world_size,))
    if mix == "two meshes":
        fully_shard(model.first, mesh=rank_mesh((1, world_size), ("replicate", "shard")))
    ignored = {model.third.weight} if mix == "plain and shard" else None
    return fully_shard(model, mesh=mesh, shard_placement_fn=MIXES[mix], ignored_params=ignored)


@pytest.mark.parametrize("option", ["foreach", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, OwnAdamW])
@on_ranks(2)
def test_mixed_lists_as_one_process(rank: int, world_size: int, kind: Any, option: str) -> None:
    for mix in ["rows and shard"] if kind is OwnAdamW else MIXES:
        model, reference = mixed(mix, world_size), unmixed()
        ours, theirs = (kind(one.parameters(), lr=0.01, **{option: True}) for one in (model, reference))
        for number in range(3):
            step(model, ours, number)
            step(reference, theirs, number)
        check(model, reference.parameters(), mix)
        for parameter, state in ours.state.items():
            name = type(parameter).__name__.replace("Parameter", "Tensor")
            assert all(not value.ndim or type(value).__name__ == name for value in state.values())


@on_ranks(2)
def test_what_torch_cannot_take_together_is_refused_by_name(rank: int, world_size: int) -> None:
    model = mixed("owned and shard", world_size)
    optimizer = OwnAdamW(model.parameters(), foreach=True)
    with pytest.raises(RuntimeError, match=r"'first\.weight' is a plain tensor.*'gain' with.*foreach=False"):
        step(model, optimizer, 0)
    apart = [[p for p in model.parameters() if (p.ndim == 2) == matrices] for matrices in (True, False)]
    optimizer = OwnAdamW([{"params": apart[0]}, {"params": apart[1], "foreach": False}], foreach=True)
    step(model, optimizer, 0)
