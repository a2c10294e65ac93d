"""Unusual ways through autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.core.engine.training_recipes.session import MLP, WIDTH, Net, Session, recipe, sgd, train


@recipe
def loss_in_chunks(session: Session) -> None:
    """Each chunk of the hidden states has a backward of its own, then the body has one."""
    body, head = Net(), nn.Linear(WIDTH, 50)
    session.shard(body, *body.blocks)
    session.shard(head)
    optimizer = sgd(body, head)
    for _ in range(3):
        hidden = body(session.batch(12, WIDTH))
        cut = hidden.detach().requires_grad_()
        for part, labels in zip(cut.chunk(3), session.labels(50, 12).chunk(3), strict=True):
            F.cross_entropy(head(part), labels, reduction="sum").backward()
        hidden.backward(cut.grad)
        session.step(optimizer, body, head)


@recipe
def one_backward_for_each_head(session: Session) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = Net(), nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(3))

        def forward(self, x: Tensor) -> list[Tensor]:
            hidden = self.body(x)
            return [head(hidden).square().mean() for head in self.heads]

    model = Model()
    session.shard(model, *model.body.blocks, *model.heads)
    optimizer = sgd(model)
    for step in range(4):
        losses = model(session.batch())
        for index, loss in enumerate(losses if step % 2 else losses[::-1]):
            loss.backward(retain_graph=index < 2)
            if step > 1:  # conflicting gradients are looked at one by one
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        session.note(f"{index} {name}", parameter.grad.norm())
        session.step(optimizer, model)


@recipe
def fixed_point_with_a_gradient_in_a_hook(session: Session) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.body = nn.Linear(WIDTH, WIDTH), MLP()

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            point = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(4):
                    point = torch.tanh(0.1 * self.body(point) + x)
            found = torch.tanh(0.1 * self.body(point) + x)
            start = found.detach().requires_grad_()
            again = torch.tanh(0.1 * self.body(start) + x)

            def solve(gradient: Tensor) -> Tensor:
                solved = gradient
                for _ in range(3):
                    solved = torch.autograd.grad(again, start, solved, retain_graph=True)[0] + gradient
                return solved

            found.register_hook(solve)
            return found

    model = Model()
    train(session, model, model.body)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.block(x)
        torch.autograd.backward(output, gradient)
        return x.grad, None


@recipe
def recomputation_of_ones_own(session: Session) -> None:
    model = Net()
    model.run = lambda block, x: _Recomputed.apply(x, block)
    train(session, model, *model.blocks)


@recipe
def recomputation_with_dropout_and_offload(session: Session) -> None:
    model = session.shard(net := Net(dropout=0.3), *net.blocks)
    optimizer = sgd(model)
    for reentrant in (False, True, None):
        model.run = (lambda block, x: block(x)) if reentrant is None else _checkpoints(reentrant)
        with torch.autograd.graph.save_on_cpu():
            loss = model(session.batch()).square().mean()
        loss.backward()
        session.step(optimizer, model)


def _checkpoints(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda block, x: checkpoint(block, x, use_reentrant=reentrant)


@recipe
def curvature(session: Session) -> None:
    model = session.shard(net := Net(), *net.blocks)
    optimizer = sgd(model)
    for _ in range(3):
        x = session.batch().requires_grad_()
        loss = model(x).sin().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (bend,) = torch.autograd.grad((slope * session.batch()).sum(), x, create_graph=True)
        (bend.square().mean() + loss).backward()
        session.step(optimizer, model)


@recipe
def decay_in_the_loss(session: Session) -> None:
    model = session.shard(net := Net(), *net.blocks)
    optimizer = sgd(model)
    for step in range(4):
        norms = [] if step % 2 else [parameter.square().sum() for parameter in model.parameters()]
        loss = model(session.batch()).square().mean()
        norms = norms or [parameter.square().sum() for parameter in model.parameters()]
        (loss + 0.01 * sum(one.full_tensor() if isinstance(one, DTensor) else one for one in norms)).backward()
        session.step(optimizer, model)
