"""`fully_shard` together with torch's own tools: compile, GradScaler, clipping, an optimizer inside backward."""

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

import shardkit.core as ours
from tests.support import run_ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(6) for _ in range(3)], nn.Linear(6, 2))


def _shard(model: nn.Sequential, api: ModuleType, **options: Any) -> nn.Sequential:
    for block in model[:-1]:
        api.fully_shard(block, **options)
    api.fully_shard(model, **options)
    return model


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def _compiled(rank: int, world_size: int, backend: str, first: str) -> None:
    eager, compiled = _model(), _model()
    _shard(eager, ours)
    if first == "compile":
        for block in compiled[:-1]:
            block.compile(backend=backend)
    _shard(compiled, ours)
    if first == "shard":
        for block in compiled[:-1]:
            block.compile(backend=backend)
    for step in range(3):
        losses = [model(_batch(step, rank)).square().mean() for model in (eager, compiled)]
        torch.testing.assert_close(losses[0], losses[1])
        for loss in losses:
            loss.backward()
        for one, two in zip(_gradients(eager), _gradients(compiled), strict=True):
            torch.testing.assert_close(one, two)
        for model in (eager, compiled):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", ["compile", "shard"])
def test_compiled_blocks(first: str, backend: str) -> None:
    run_ranks(2, _compiled, backend, first, timeout=240)


def _train_compiled(api: ModuleType, what: str, first: str, rank: int) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Losses, gradients and dynamo's counters. Blocks are compiled whole: a graph break in one is an error."""
    torch._dynamo.reset()
    counters.clear()
    model = _model()
    if first == "shard":
        _shard(model, api)
    if what == "blocks":
        for block in model[:-1]:
            block.compile(backend="eager", fullgraph=True)
    elif what == "module":
        model.compile(backend="eager")
    if first == "compile":
        _shard(model, api)
    forward = torch.compile(model, backend="eager") if what == "model" else model
    losses = []
    for step in range(2):
        losses.append(forward(_batch(step, rank)).square().mean())
        losses[-1].backward()
    counted = {"graph breaks": sum(counters["graph_break"].values()), "graphs": counters["stats"]["unique_graphs"]}
    return [*losses, *_gradients(model)], counted


def _graph_breaks(rank: int, world_size: int, what: str, first: str) -> None:
    (expected, by_stock), (seen, by_ours) = (_train_compiled(api, what, first, rank) for api in (stock, ours))
    assert by_stock == by_ours
    assert what != "blocks" or by_ours["graph breaks"] == 0
    assert by_ours["graphs"] > 0
    for one, two in zip(expected, seen, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("what", ["blocks", "module", "model"])
@pytest.mark.parametrize("first", ["compile", "shard"])
def test_graph_breaks_are_those_of_stock(what: str, first: str) -> None:
    """Blocks have no graph breaks; `module.compile()` has none with torch 2.13 and one with 2.15."""
    run_ranks(2, _graph_breaks, what, first, timeout=240)


def _scaled(rank: int, world_size: int) -> None:
    results = []
    for api in (stock, ours):
        model = _shard(_model(), api)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales = []
        for step in range(4):
            loss = model(_batch(step, rank)).square().mean()
            if step == 2:
                loss = loss * float("inf")  # all ranks skip this step and halve the scale
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        results.append((scales, [parameter.to_local().clone() for parameter in model.parameters()]))
    (their_scales, their_parameters), (scales, parameters) = results
    assert scales == their_scales
    assert scales[2] < scales[1]
    assert all(torch.equal(one, two) for one, two in zip(parameters, their_parameters, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_grad_scaler_with_clipping(world_size: int) -> None:
    run_ranks(world_size, _scaled)


def _clipped(rank: int, world_size: int) -> None:
    one, two = _shard(_model(), ours), _shard(_model(), ours)
    for model in (one, two):
        (100 * model(_batch(0, rank)).square().mean()).backward()
    norm = ours.clip_grad_norm_(one.parameters(), 0.25)
    expected = torch.nn.utils.clip_grad_norm_(two.parameters(), 0.25)
    assert isinstance(expected, DTensor)
    torch.testing.assert_close(norm, expected.full_tensor())
    assert norm > 0.25
    for mine, theirs in zip(_gradients(one), _gradients(two), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clipping_is_torchs(world_size: int) -> None:
    run_ranks(world_size, _clipped)


def _optimizer_in_backward(rank: int, world_size: int) -> None:
    """Each parameter steps as soon as its gradient is there, so no gradient is left after backward."""
    results = []
    for in_backward in (False, True):
        model = _shard(_model(), ours)
        parameters = list(model.parameters())
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in parameters}
        calls = 0

        def step(parameter: torch.Tensor, optimizers: Any = optimizers) -> None:
            nonlocal calls
            calls += 1
            assert isinstance(parameter.grad, DTensor)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        if in_backward:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(step)
        for number in range(3):
            model(_batch(number, rank)).square().mean().backward()
            if in_backward:
                assert all(parameter.grad is None for parameter in parameters)
            else:
                for optimizer in optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
        assert calls == (3 * len(parameters) if in_backward else 0)
        results.append([parameter.to_local().clone() for parameter in parameters])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_optimizer_in_backward(world_size: int) -> None:
    run_ranks(world_size, _optimizer_in_backward)


def _step_after_a_forward_alone(rank: int, world_size: int, kind: str) -> None:
    """A forward that no backward follows leaves the root unsharded; a step then makes that memory stale."""
    model = _shard(_model(), ours)
    # AdamW: torch 2.13 has no DTensor strategy for fused SGD.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=kind == "foreach", fused=kind == "fused")
    model(_batch(0, rank)).square().mean().backward()
    model(_batch(1, rank))
    optimizer.step()
    fresh = _shard(_model(), ours)
    fresh.load_state_dict(model.state_dict())
    model(_batch(1, rank))  # unsharded again, then stepped again without a state dict in between
    optimizer.step()
    optimizer.zero_grad()
    after = model(_batch(2, rank))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(after, fresh(_batch(2, rank)))


@pytest.mark.parametrize("kind", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_between_forwards_is_seen_by_the_next_one(world_size: int, kind: str) -> None:
    run_ranks(world_size, _step_after_a_forward_alone, kind)
