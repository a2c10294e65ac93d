"""Backward that enters a block by other ways than its outputs, against one process: schedule.py, [Ready in order].

In each program a block computes something beside its output after the output, so that backward reaches the block
through it first, while the gather of the block's parameters is under way.
"""

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.core import events, fully_shard, register_fsdp_forward_method
from tests.support import on_ranks
from tests.support.heard import heard
from tests.support.meshes import networked_mesh
from tests.support.models import Composed
from tests.support.sharding import shard_each
from tests.support.twins import Twins, batch

WIDTH = 96  # large enough for a chunk to travel by itself, in place
GLOBALLY_KEPT: list[Tensor] = []


def _block() -> nn.Module:
    """Linear layers, and a router whose loss is kept in a global list."""

    def run(block: Any, x: Tensor) -> Any:
        hidden = x + block.second(torch.tanh(block.first(x)))
        GLOBALLY_KEPT.append(block.router(torch.tanh(block.router(x))).square().mean())
        return hidden

    first, second, router = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return Composed(run, first=first, second=second, router=router)


def _kept_in_global() -> nn.Module:
    """Blocks between two linear layers of the root; returns the output and the sum of the losses that blocks kept."""

    def run(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        GLOBALLY_KEPT.clear()
        x = model.inp(x)
        for block in model.blocks:
            x = block(x)
        return model.out(x), sum(GLOBALLY_KEPT)

    inp, out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Composed(run, inp=inp, out=out, blocks=nn.ModuleList(_block() for _ in range(5)))


@on_ranks(2)
def test_a_loss_kept_in_a_global_variable(rank: int, world_size: int) -> None:
    """The random programs keep losses on modules and in closures."""

    def loss(model: nn.Module, of: int) -> Tensor:
        output, aux = model(batch(of, 8, WIDTH))
        return output.square().mean() + aux

    mesh = networked_mesh((world_size,))
    for depth in (0, 2):
        twins = Twins.of(rank, world_size, _kept_in_global, lambda model: shard_each(*model.blocks, model, mesh=mesh))
        twins.sharded.set_prefetch_depth(depth)
        twins.step(loss, times=3)


# -- cases that cannot be supported raise ------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulated", [False, True])
@on_ranks(2)
def test_gradients_that_nobody_reduced_are_no_step(rank: int, world_size: int, accumulated: bool) -> None:
    """A loss in a global variable, and nothing else: no hook is called, and no gradient would be reduced."""
    model = fully_shard(_kept_in_global())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if accumulated:
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model(batch(rank, 8, WIDTH))[0].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch(rank, 8, WIDTH))
    GLOBALLY_KEPT[-1].backward()
    unreduced = r"(?s)the gradient of parameter 'inp.weight' was not reduced.*set it as an attribute of the module"
    with pytest.raises(RuntimeError, match=unreduced):
        optimizer.step()


def _act(act: str, block: Any, x: Tensor) -> Tensor:
    if act == "hook":
        x.register_hook(lambda gradient: gradient * 3)
    elif act == "change":
        x += 1
    elif act == "change a view":
        x[0].mul_(2)
    return x if act == "pass" else block.linear(x)


def _around(rank: int, world_size: int, act: str) -> Twins:
    """A block that does something to its input, which the model uses once more."""

    def run(model: Any, x: Tensor) -> Tensor:
        x = model.inp(x)
        return x * 2 + model.block(x)

    def build() -> nn.Module:
        block = Composed(functools.partial(_act, act), linear=nn.Linear(WIDTH, WIDTH))
        return Composed(run, inp=nn.Linear(WIDTH, WIDTH), block=block)

    return Twins.of(rank, world_size, build, lambda model: shard_each(model.block, model))


@pytest.mark.parametrize("act", ["hook", "pass"])
@on_ranks(2)
def test_what_a_block_does_to_its_input(rank: int, world_size: int, act: str) -> None:
    twins = _around(rank, world_size, act)
    if act == "pass":
        for parameter in (*twins.whole.block.parameters(), *twins.sharded.block.parameters()):
            parameter.requires_grad_(False)
    twins.step(lambda model, rank: model(batch(rank, 8, WIDTH)).square().sum(), times=2)


@pytest.mark.parametrize("act", ["change", "change a view"])
@on_ranks(2)
def test_an_input_changed_in_place_names_the_block(rank: int, world_size: int, act: str) -> None:
    model = _around(rank, world_size, act).sharded
    with pytest.raises(RuntimeError) as error:
        model(batch(rank, 8, WIDTH))
    message = "\n".join([str(error.value), *error.value.__notes__])
    assert "'block' changes one of its inputs in place" in message
    assert message.count("clone the input first") == 1


def _molecule() -> nn.Module:
    """A recomputed module adds the gradient of a child's output to its input: an inner backward that builds a graph."""

    def force(module: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x if x.requires_grad else x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(module.energy(inner).sin().sum(), inner, create_graph=True)
        return x + gradient

    def run(model: Any, x: Tensor) -> Tensor:
        x = checkpoint(model.force, model.inp(x), use_reentrant=True)
        for one in model.after:
            x = torch.tanh(one(x))
        return x.square().mean()

    inp, energy, *after = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
    return Composed(run, inp=inp, force=Composed(force, energy=energy), after=nn.ModuleList(after))


@on_ranks(2)
def test_a_recomputation_whose_inner_backward_builds_a_graph(rank: int, world_size: int) -> None:
    """In one backward over two forwards; stock ends with an error of torch, or a crash."""
    shard = lambda model: shard_each(model.force.energy, *model.after, model)  # noqa: E731
    twins = Twins.of(rank, world_size, _molecule, shard)
    for _ in range(2):
        twins.step(lambda model, of: model(batch(of, 3, WIDTH)) + model(batch(of + 10, 3, WIDTH)))
        assert all(hasattr(value, "placements") for value in twins.sharded.state_dict().values())


@on_ranks(2)
def test_a_backward_inside_forward_leaves_the_outer_one_its_order(rank: int, world_size: int) -> None:
    """The inner backward gathers none of the blocks, and the outer one still gathers them ahead."""

    def run(model: Any, x: Tensor) -> Tensor:
        for number, block in enumerate(model.blocks):
            x = block(x).tanh()
            if number == 2:
                model.aside(x.detach()).square().mean().backward()
        return x

    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    model = Composed(run, blocks=blocks, aside=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    shard_each(*model.blocks, *model.aside, model)
    for _ in range(3):
        with heard(events.GatherStarted) as gathers:
            loss = model(batch(rank, 3, 4)).square().mean()
        with heard(events.PrefetchMiss) as misses:
            loss.backward()
    in_forward = [event.fqn for event in gathers]
    assert [in_forward.count(f"blocks.{number}") for number in range(3)] == [1, 1, 1]
    assert misses == []


@on_ranks(2)
def test_a_second_forward_in_another_thread_is_refused(rank: int, world_size: int) -> None:
    model, inside, go_on = _around(rank, world_size, "none").sharded, threading.Event(), threading.Event()

    def stop(*unused: Any) -> None:
        inside.set()
        go_on.wait(60)

    model.block.linear.register_forward_pre_hook(stop)
    thread = threading.Thread(target=lambda: model(batch(rank, 8, WIDTH)))
    thread.start()
    assert inside.wait(60)
    begins = "forward of 'FSDPComposed' begins, but the forward of 'FSDPComposed' has not ended"
    try:
        with pytest.raises(RuntimeError, match=begins):
            model(batch(rank, 8, WIDTH))
    finally:
        go_on.set()
        thread.join()
    model(batch(rank, 8, WIDTH)).sum().backward()


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return self.linear(x) if times == 1 else self(self.linear(x), times - 1)

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x, 1), 1)


@on_ranks(2)
def test_a_root_that_calls_itself(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, _Twice, fully_shard)
    with pytest.raises(RuntimeError, match=r"forward of 'FSDP_Twice' begins, .* has not ended .*calls itself"):
        twins.sharded(batch(rank, 2, 8))
    twins.sharded.reset_iter_state()
    register_fsdp_forward_method(twins.sharded, "twice")
    twins.step(lambda model, rank: model.twice(batch(rank, 2, 8)).square().sum(), times=2)


@on_ranks(2)
def test_a_frozen_root_stays_for_a_graph_that_no_output_shows(rank: int, world_size: int) -> None:
    """Frozen, and its output is unused: only a global list leads to the graph."""

    def run(model: Any, x: Tensor, prompts: list[Tensor]) -> Tensor:
        GLOBALLY_KEPT.append(model.second((model.first(x) * prompts[0]).tanh()).square().sum())
        return x.detach()

    build = lambda: Composed(run, first=nn.Linear(4, 4), second=nn.Linear(4, 4)).requires_grad_(False)  # noqa: E731
    twins = Twins.of(rank, world_size, build, fully_shard)
    gradients = []
    for model in twins.both:
        prompt = torch.ones(4, requires_grad=True)
        model(torch.ones(2, 4), [prompt])
        GLOBALLY_KEPT.pop().backward()
        gradients.append(prompt.grad)
    torch.testing.assert_close(*gradients)
