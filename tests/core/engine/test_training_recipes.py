"""Training scripts of the kinds that people run give the same results on two ranks as in one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support import on_ranks
from tests.support.meshes import networked_mesh
from tests.support.models import Block, Composed
from tests.support.sharding import shard_each
from tests.support.twins import batch

WIDTH = 32  # a matrix of that width travels by itself, in place


class Session:
    """Shards and trains for a recipe. ``shard`` does nothing in one process. Every rank has the same batches."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.seen: list[tuple[str, Tensor]] = []
        self._batches = 0

    def shard(self, model: nn.Module, *blocks: nn.Module) -> Any:
        """``fully_shard`` of the blocks, then of the model."""
        return shard_each(*blocks, model, mesh=networked_mesh((self.ranks,))) if self.ranks > 1 else model

    def batch(self, *shape: int) -> Tensor:
        self._batches += 1
        return batch(self._batches, *(shape or (8, WIDTH)))

    def step(self, optimizer: torch.optim.Optimizer, *models: nn.Module) -> None:
        """Notes all gradients, makes a step, and notes all parameters."""
        parameters = [one for model in models for one in model.named_parameters()]
        self._note((f"gradient of {name}", one.grad) for name, one in parameters if one.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        self._note(parameters)

    def _note(self, values: Any) -> None:
        for name, value in values:
            self.seen.append((name, (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()))


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters() if p.requires_grad], lr=0.05)


def train(session: Session, model: Any, *blocks: nn.Module, steps: int = 3) -> None:
    """The plain loop, over the mean square of the output."""
    session.shard(model, *blocks)
    optimizer = sgd(model)
    for _ in range(steps):
        model(session.batch()).square().mean().backward()
        session.step(optimizer, model)


class Net(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self, *blocks: nn.Module, out: int = WIDTH) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, out)
        self.blocks = nn.ModuleList(blocks or [Block(WIDTH, 2 * WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


# -- unusual ways through autograd -------------------------------------------------------------------------------------


def fixed_point_with_a_gradient_in_a_hook(session: Session) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        x = model.inp(x)
        point = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(4):
                point = torch.tanh(0.1 * model.body(point) + x)
        found = torch.tanh(0.1 * model.body(point) + x)
        start = found.detach().requires_grad_()
        again = torch.tanh(0.1 * model.body(start) + x)

        def solve(gradient: Tensor) -> Tensor:
            solved = gradient
            for _ in range(3):
                solved = torch.autograd.grad(again, start, solved, retain_graph=True)[0] + gradient
            return solved

        found.register_hook(solve)
        return found

    model = Composed(run, inp=nn.Linear(WIDTH, WIDTH), body=Block(WIDTH, 2 * WIDTH))
    train(session, model, model.body)


def decay_in_the_loss(session: Session) -> None:
    model = session.shard(net := Net(), *net.blocks)
    optimizer = sgd(model)
    for step in range(4):
        norms = [] if step % 2 else [parameter.square().sum() for parameter in model.parameters()]
        loss = model(session.batch()).square().mean()
        norms = norms or [parameter.square().sum() for parameter in model.parameters()]
        (loss + 0.01 * sum(one.full_tensor() if isinstance(one, DTensor) else one for one in norms)).backward()
        session.step(optimizer, model)


# -- keys that blocks keep aside ---------------------------------------------------------------------------------------


def trained_key_cache(session: Session) -> None:
    """Keys of one forward are in the graph of the next: one backward goes through both."""

    def attention(block: Any, x: Tensor) -> Tensor:
        query, *key_and_value = block.qkv(x).chunk(3, -1)
        block.cache.append(key_and_value)
        key, value = (torch.cat(parts, 1) for parts in zip(*block.cache, strict=True))
        return x + F.scaled_dot_product_attention(query, key, value)

    model = Net(*(Composed(attention, qkv=nn.Linear(WIDTH, 3 * WIDTH), cache=[]) for _ in range(3)))
    session.shard(model, *model.blocks)
    optimizer = sgd(model)
    for _ in range(3):
        for block in model.blocks:
            block.cache.clear()
        outputs = [model(session.batch(2, 3, WIDTH)) for _ in range(3)]
        (outputs[0].square().mean() + outputs[2].square().mean()).backward()
        session.step(optimizer, model)


# -- parameters that are hooked or computed ----------------------------------------------------------------------------


def _halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def gradient_hooks(session: Session) -> None:
    """Some from before the parameters were sharded, one on a parameter that is frozen meanwhile."""
    model = Net()
    removed = model.inp.weight.register_hook(lambda gradient: gradient * 100)
    for parameter in model.blocks.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model.out.bias.register_post_accumulate_grad_hook(_halve_gradient)
    model.out.bias.requires_grad_(False)
    session.shard(model, *model.blocks)
    removed.remove()
    model.out.bias.requires_grad_(True)
    model.out.weight.register_hook(lambda gradient: gradient * 0.5)
    optimizer = sgd(model)
    for _ in range(3):
        model(session.batch()).square().mean().backward()
        session.step(optimizer, model)


def computed_weights(session: Session) -> None:
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    torch.nn.utils.parametrizations.weight_norm(linears[0])
    torch.nn.utils.parametrizations.spectral_norm(linears[1])
    torch.nn.utils.parametrizations.orthogonal(linears[2])
    torch.nn.utils.spectral_norm(linears[3])
    train(session, nn.Sequential(*linears), *linears)


# -- optimizers --------------------------------------------------------------------------------------------------------


def line_search(session: Session) -> None:
    model = session.shard(net := Net(Block(WIDTH, 2 * WIDTH)), *net.blocks)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    for _ in range(2):
        x = session.batch()

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        session.step(sgd(model), model)


# -- several models ----------------------------------------------------------------------------------------------------


def adversarial_with_a_frozen_judge_and_a_penalty(session: Session) -> None:
    maker, judge = Net(), Net(out=1)
    for model in (maker, judge):
        session.shard(model, *model.blocks)
    makes, judges = sgd(maker), sgd(judge)
    for _ in range(3):
        judge.requires_grad_(True)
        with torch.no_grad():
            made = maker(session.batch())
        mixed = (0.3 * session.batch() + 0.7 * made).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        (judge(made).mean() - judge(session.batch()).mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        session.step(judges, judge)
        judge.requires_grad_(False)
        (-judge(maker(session.batch())).mean()).backward()
        session.step(makes, maker)


# -- the test ----------------------------------------------------------------------------------------------------------

RECIPES = [
    fixed_point_with_a_gradient_in_a_hook,
    decay_in_the_loss,
    trained_key_cache,
    gradient_hooks,
    computed_weights,
    line_search,
    adversarial_with_a_frozen_judge_and_a_penalty,
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_two_ranks_train_as_one_process_does(rank: int, world_size: int, recipe: Any) -> None:
    torch.set_default_dtype(torch.float64)
    alone, sharded = Session(1), Session(world_size)
    for session in (alone, sharded):
        torch.manual_seed(3)
        recipe(session)
    for (name, expected), (other, seen) in zip(alone.seen, sharded.seen, strict=True):
        assert name == other
        torch.testing.assert_close(seen, expected, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
