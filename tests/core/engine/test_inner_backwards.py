"""Backwards inside forwards, forwards that only hooks of tensors see, and ties to a group that is gathered."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.core import events, fully_shard
from tests.support import on_ranks
from tests.support.twins import Twins, batch

WIDTH = 6
KEPT: list[Tensor] = []


class Force(nn.Module):
    """Its forward takes the gradient of a child through the child's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x)
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(inner).sin().sum(), inner)
        return x + force


class Molecule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.force = nn.Linear(WIDTH, WIDTH), Force()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.force, self.first(x), use_reentrant=True)


def _shard_molecule(model: Any) -> None:
    for one in (model.first, model.force.energy, model.force, model):
        fully_shard(one)


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(batch(rank, 3, WIDTH)).square().mean()


@on_ranks(2)
def test_an_inner_backward_in_a_recomputation_leaves_the_module_sharded(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, Molecule, _shard_molecule)
    for _ in range(2):
        twins.backward(_loss)
        twins.check_gradients()
        plain = [name for name, value in twins.sharded.state_dict().items() if not hasattr(value, "placements")]
        assert not plain
        twins.update()


class Keeping(nn.Module):
    """Keeps a part of the loss in a global list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        KEPT.append(self.linear(self.linear(x)).square().mean())
        return self.linear(x)


class Heads(nn.Module):
    """One head gets no gradient, the other one has an input that needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.unused = Keeping(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.head(hidden.detach()), self.unused(hidden)


def _shard_heads(model: Any) -> None:
    for one in (model.body, model.head, model.unused, model):
        fully_shard(one)


def _heads_loss(model: nn.Module, rank: int) -> Tensor:
    output, _ = model(batch(rank, 3, WIDTH))
    return output.square().mean() + KEPT.pop()


@on_ranks(2)
def test_the_forward_that_backward_begins_in_is_not_set_aside(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, Heads, _shard_heads)
    twins.backward(_heads_loss)
    twins.check_gradients()


@on_ranks(2)
def test_a_tie_to_a_group_that_is_gathered(rank: int, world_size: int) -> None:
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model[0])
    model[0].unshard()
    fully_shard(model[1])
    model[0].reshard()
    fully_shard(model)
    _loss(model, rank).backward()
    assert model[0].weight is model[1].weight
    assert model[0].weight.grad is not None


class _Looking(nn.Module):
    """Runs a backward of its own in the middle of forward, through a module of its own."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.aside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.looks = looks

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x).tanh()
            if self.looks and number == 2:
                self.aside(x.detach()).square().mean().backward()
        return x


@on_ranks(2)
def test_a_backward_inside_forward_leaves_the_outer_one_its_order(rank: int, world_size: int) -> None:
    """The inner backward gathers none of the blocks, and the outer one still gathers them ahead."""
    model: Any = _Looking(looks=True)
    for module in (*model.blocks, *model.aside, model):
        fully_shard(module)
    for _ in range(3):
        seen: list[events.Event] = []
        with events.subscribe(seen.append):
            loss = model(batch(rank, 3, 4)).square().mean()
            in_forward = [event.fqn for event in seen if isinstance(event, events.GatherStarted)]
            seen.clear()
            loss.backward()
    assert [in_forward.count(f"blocks.{number}") for number in range(3)] == [1, 1, 1]
    assert [event.fqn for event in seen if isinstance(event, events.PrefetchMiss)] == []
