"""Parameters that are frozen, shared, changed or computed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.engine.training_recipes.session import MLP, WIDTH, Net, Session, net_of, recipe, recomputed, sgd, train


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank that can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.on = nn.Linear(WIDTH, WIDTH).requires_grad_(False), True
        self.down, self.up = (nn.Parameter(torch.randn(shape) / 6) for shape in ((WIDTH, 4), (4, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.base(x))
        return y + x @ self.down @ self.up if self.on else y


def _adapted() -> Net:
    model = net_of([Adapted() for _ in range(3)])
    model.inp.requires_grad_(False)
    model.out.requires_grad_(False)
    return model


@recipe
def adapters_toggled_and_recomputed(session: Session) -> None:
    model = _adapted()
    model.run = recomputed
    session.shard(model, *model.blocks)
    optimizer = sgd(model)
    for step in range(4):
        for index, block in enumerate(model.blocks):
            block.on = index == 1 or step % 2 == 0  # type: ignore[assignment]
        model(session.batch()).square().mean().backward()
        session.step(optimizer, model)


@recipe
def adapters_and_their_base_as_reference(session: Session) -> None:
    model = session.shard(net := _adapted(), *net.blocks)
    optimizer = sgd(model)
    for _ in range(3):
        x = session.batch()
        y = model(x)
        for block in model.blocks:
            block.on = False
        with torch.no_grad():
            reference = model(x)
        for block in model.blocks:
            block.on = True
        (-F.logsigmoid((y - reference).sum(1) - 1).mean()).backward()
        session.step(optimizer, model)


@recipe
def unfrozen_into_a_new_optimizer_group(session: Session) -> None:
    model = Net(3)
    model.blocks.requires_grad_(False)
    session.shard(model, *model.blocks)
    optimizer = sgd(model)
    for step in range(4):
        if step:
            model.blocks[3 - step].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks[3 - step].parameters()), "lr": 0.01})
        model(session.batch()).square().mean().backward()
        session.step(optimizer, model)


def _halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@recipe
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


@recipe
def a_module_in_two_sharded_ones(session: Session) -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.linear = inner, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.inner(x))  # type: ignore[no-any-return]

    inner = MLP()
    model = nn.Sequential(Around(inner), MLP(), Around(inner))
    train(session, model, *model)


@recipe
def weight_of_another_module(session: Session) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.linear, self.last = MLP(), nn.Linear(WIDTH, WIDTH), MLP()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.linear(self.first(x), self.linear.weight)) @ self.linear.weight  # type: ignore[no-any-return]

    model = Model()
    train(session, model, model.first, model.last)


@recipe
def computed_weights(session: Session) -> None:
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    torch.nn.utils.parametrizations.weight_norm(linears[0])
    torch.nn.utils.parametrizations.spectral_norm(linears[1])
    torch.nn.utils.parametrizations.orthogonal(linears[2])
    torch.nn.utils.spectral_norm(linears[3])
    train(session, nn.Sequential(*linears), *linears)


@recipe
def batches_of_other_sizes(session: Session) -> None:
    model = session.shard(net := Net(), *net.blocks)
    optimizer = sgd(model)
    for rows in (4, 1, 0, 7):
        model(session.batch(rows, WIDTH)).square().sum().backward()
        session.step(optimizer, model)


@recipe
def own_lstm_in_windows(session: Session) -> None:
    class Recurrent(nn.LSTM):
        def forward(self, x: Any, state: Any = None) -> Any:
            self.last = x.mean()
            return super().forward(x, state)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = Recurrent(WIDTH, WIDTH, 2), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, state: Any) -> Any:
            y, state = self.lstm(x, state)
            return self.out(y), state

    model = Model()
    session.shard(model, model.lstm, model.out)
    optimizer = sgd(model)
    state = None
    for _ in range(4):
        y, state = model(session.batch(5, 4, WIDTH), state)
        state = tuple(one.detach() for one in state)
        y.square().mean().backward()
        session.step(optimizer, model)
