"""Unchanged optimizers on owned parameters or on whole blocks: against one process, bit for bit."""

import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from shardkit.core import Blocks, Owned, fully_shard, optimizer_step_on_shards, plan_owners
from shardkit.core.torch_compat import local_of
from tests.support import rank_mesh, run_ranks

Build = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((12, 20), (20, 20), (20, 8), (8, 12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1)


def soap(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return pytest.importorskip("pytorch_optimizer").SOAP(parameters, lr=0.01, precondition_frequency=2)


def shampoo(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return pytest.importorskip("pytorch_optimizer").Shampoo(parameters, lr=0.01, preconditioning_compute_steps=3)


def heavy_soap(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    heavyball = pytest.importorskip("heavyball")
    heavyball.utils.compile_mode = None
    heavyball.SOAP.steps_each_parameter_alone = True
    return heavyball.SOAP(parameters, lr=0.01)


def adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)


class EveryOther(torch.optim.Optimizer):
    """Keeps a gradient in its state at one step, uses it and removes it at the next."""

    steps_each_parameter_alone = True

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

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


OPTIMIZERS: dict[str, Build] = {
    "every_other": EveryOther,
    "muon": muon,
    "adafactor": adafactor,
    "soap": soap,
    "shampoo": shampoo,
    "heavyball_soap": heavy_soap,
}


def build() -> Net:
    torch.manual_seed(5)
    return Net()


def shard(model: Net, world_size: int, choose: Callable[[nn.Parameter], object]) -> Net:
    mesh = rank_mesh((world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=choose)
    return fully_shard(model, mesh=mesh, shard_placement_fn=choose)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def gradients_for(model: nn.Module, reference: nn.Module, rank: int, step: int) -> None:
    """Runs a backward of the sharded model, and gives the reference the same reduced gradients."""
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).square().mean().backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        whole.grad = sharded.grad.full_tensor()


def _same(rank: int, world_size: int, name: str) -> None:
    warnings.simplefilter("ignore")
    reference, model = build(), build()
    start = [p.detach().clone() for p in matrices(reference)]
    model = shard(model, world_size, plan_owners(model))
    ours, theirs = OPTIMIZERS[name](matrices(model)), OPTIMIZERS[name](matrices(reference))
    collectives = 0
    for step in range(20):
        gradients_for(model, reference, rank, step)
        torch.manual_seed(step)
        with torch.compiler.set_stance("force_eager"), CommDebugMode() as counted:
            ours.step()
        collectives += counted.get_total_counts()
        torch.manual_seed(step)
        with torch.compiler.set_stance("force_eager"):
            theirs.step()
        for sharded, whole in zip(matrices(model), matrices(reference), strict=True):
            assert torch.equal(sharded.full_tensor(), whole), step
        ours.zero_grad()
        theirs.zero_grad()
    assert collectives == 0
    assert not any(torch.equal(one, p) for one, p in zip(start, matrices(reference), strict=True))
    assert [len(group["params"]) for group in ours.param_groups] == [
        len(group["params"]) for group in theirs.param_groups
    ]
    for p, whole in zip(matrices(model), matrices(reference), strict=True):
        if ours.state.get(p):
            assert ours.state[p].keys() == theirs.state[whole].keys()
        assert any(p is one for group in ours.param_groups for one in group["params"])
        assert name == "muon" or bool(ours.state.get(p)) == bool(local_of(p).numel()), "state lies with the owner"
        for value in ours.state.get(p, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == p.shape:
                assert isinstance(value, DTensor)
                assert value.placements == p.placements


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_steps_on_whole_matrices_as_one_process_does(world_size: int, name: str) -> None:
    run_ranks(world_size, _same, name, timeout=120)


def _clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1e-2)


def _clip_in_hooks(rank: int, world_size: int, on_shards: bool) -> None:
    reference, model = build(), build()
    model = shard(model, world_size, plan_owners(model))
    ours, theirs = (torch.optim.SGD(matrices(one), lr=1.0) for one in (model, reference))
    if on_shards:
        optimizer_step_on_shards(ours)
    seen: list[bool] = []
    for optimizer in (ours, theirs):
        optimizer.register_step_pre_hook(_clip)
    ours.register_step_post_hook(lambda *_: seen.extend(isinstance(p, DTensor) for p in ours.param_groups[0]["params"]))
    for step in range(2):
        gradients_for(model, reference, rank, step)
        ours.step()
        theirs.step()
        for sharded, whole in zip(matrices(model), matrices(reference), strict=True):
            torch.testing.assert_close(sharded.full_tensor(), whole)
    assert seen == [True] * 8
    assert len(ours._optimizer_step_pre_hooks) == 1, "ours come and go with each step"


@pytest.mark.parametrize("on_shards", [False, True])
def test_step_hooks_see_whole_norms(on_shards: bool) -> None:
    run_ranks(2, _clip_in_hooks, on_shards)


class Wide(nn.Module):
    """Weights of 256 x 64 elements (four blocks of 4096), 64 x 256, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](torch.tanh(self.layers[1](torch.tanh(self.layers[0](torch.cat([x] * 6, 1)[:, :64])))))


def ao_8bit(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return pytest.importorskip("torchao.optim").AdamW8bit(parameters, lr=0.01)


def ao_4bit(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return pytest.importorskip("torchao.optim").AdamW4bit(parameters, lr=0.01)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def bnb_8bit(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(parameters, lr=0.01)


BLOCKWISE: dict[str, Build] = {"adamw": adamw, "torchao_8bit": ao_8bit, "torchao_4bit": ao_4bit, "bnb_8bit": bnb_8bit}


def in_blocks(parameter: nn.Parameter) -> object:
    return Blocks(elements=4096) if parameter.numel() % 4096 == 0 else Owned()


def _blocks(rank: int, world_size: int, name: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(6)
    reference = Wide()
    torch.manual_seed(6)
    model = shard(Wide(), world_size, in_blocks)
    start = [p.detach().clone() for p in reference.parameters()]
    ours, theirs = BLOCKWISE[name](model.parameters()), BLOCKWISE[name](reference.parameters())
    with torch.compiler.set_stance("force_eager"):
        for step in range(5):
            gradients_for(model, reference, rank, step)
            with CommDebugMode() as counted:
                ours.step()
            assert counted.get_total_counts() == 0
            theirs.step()
            for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(sharded.full_tensor(), whole), (step, sharded.shape)
    assert not any(torch.equal(one, p) for one, p in zip(start, reference.parameters(), strict=True))


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_steps_on_blocks_as_one_process_does(world_size: int, name: str) -> None:
    run_ranks(world_size, _blocks, name, timeout=120)


class FailingMuon(torch.optim.Muon):
    steps_each_parameter_alone = True
    fails = False

    def step(self, closure: object = None) -> None:
        if self.fails:
            raise ArithmeticError("planted")
        super().step()


def _interrupted(rank: int, world_size: int) -> None:
    model, reference = build(), build()
    model = shard(model, world_size, plan_owners(model))
    ours, theirs = FailingMuon(matrices(model), lr=0.02), FailingMuon(matrices(reference), lr=0.02)
    for step in range(3):
        gradients_for(model, reference, rank, step)
        for optimizer in (ours, theirs):
            optimizer.fails = step == 1
            try:
                optimizer.step()
            except ArithmeticError:
                assert step == 1
            optimizer.zero_grad()
    assert all(isinstance(p, DTensor) for p in ours.param_groups[0]["params"])
    for sharded, whole in zip(matrices(model), matrices(reference), strict=True):
        assert torch.equal(sharded.full_tensor(), whole)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_raises_leaves_the_next_ones_right(world_size: int) -> None:
    run_ranks(world_size, _interrupted)


class NestedMuon(torch.optim.Muon):
    steps_each_parameter_alone = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        return super().step(closure)


def _with_closure(rank: int, world_size: int, kind: type[torch.optim.Muon]) -> None:
    model, reference = build(), build()
    model = shard(model, world_size, plan_owners(model))
    theirs = muon(matrices(reference))  # from now on torch calls hooks for the step of the base class, too
    ours = kind(matrices(model), lr=0.02, weight_decay=0.1)
    for step in range(3):

        def closure() -> float:
            ours.zero_grad()
            gradients_for(model, reference, rank, step)  # noqa: B023
            return 1.5

        assert ours.step(closure) == 1.5
        theirs.step()
        for sharded, whole in zip(matrices(model), matrices(reference), strict=True):
            assert torch.equal(sharded.full_tensor(), whole)


@pytest.mark.parametrize("kind", [torch.optim.Muon, NestedMuon])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_closure_sees_the_parameters_themselves(world_size: int, kind: type[torch.optim.Muon]) -> None:
    run_ranks(world_size, _with_closure, kind)


def _drops(rank: int, world_size: int) -> None:
    model = shard(build(), world_size, lambda p: Owned(rank=0))

    torch.optim.SGD([torch.ones(1)])  # from now on torch calls hooks for the step of the base class, too

    class Dropping(torch.optim.SGD):
        steps_each_parameter_alone = True
        drops = True

        def step(self, closure: object = None) -> None:
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    assert not isinstance(p, DTensor)
                    p.grad = None if self.drops else p.grad

    optimizer = Dropping(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.drops = step != 1  # the next step begins as the one before
        model(torch.ones(2, 12)).sum().backward()
        optimizer.step()
        assert all((p.grad is None) == optimizer.drops for p in model.parameters() if local_of(p).numel()), step
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape)
    if rank == 0:  # the other one passes all of them over
        with pytest.raises(RuntimeError, match="has a gradient with"):
            optimizer.step()


def _drops_after_a_refusal(rank: int, world_size: int) -> None:
    model = shard(build(), world_size, lambda p: Owned(rank=0))

    class Dropping(torch.optim.SGD):
        steps_each_parameter_alone = True
        drops = False

        def step(self, closure: object = None) -> None:
            super().step()
            for parameter in self.param_groups[0]["params"] if self.drops else ():
                parameter.grad = None

    optimizer = Dropping(model.parameters(), lr=0.1)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 12)).sum().backward()
        optimizer.step()
    first, *_, last = model.parameters()
    removed, first.grad = first.grad, None
    replaced, last.grad = last.grad, torch.ones(last.shape)
    with pytest.raises(RuntimeError, match="has a gradient with"):
        optimizer.step()
    first.grad, last.grad, optimizer.drops = removed, replaced, True
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_gradients_are_dropped_after_a_step_that_was_refused() -> None:
    run_ranks(1, _drops_after_a_refusal)


def test_gradients_that_an_optimizer_drops_are_dropped() -> None:
    run_ranks(2, _drops)


def _refuses(rank: int, world_size: int) -> None:
    model = shard(build(), world_size, lambda p: Blocks(rows=4))
    model(torch.ones(2, 12)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"Blocks\(rows=4\).*takes parameters on Owned\(\)"):
        muon(matrices(model)).step()


def test_an_optimizer_that_needs_matrices_refuses_blocks() -> None:
    run_ranks(2, _refuses)
