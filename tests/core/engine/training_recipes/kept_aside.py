"""Losses, keys and views that blocks keep aside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.engine.training_recipes.session import WIDTH, Session, net_of, recipe, recomputed, sgd, train


class Experts(nn.Module):
    """A mixture of experts: the router's losses are attributes, its load a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        weight, chosen = share.topk(2, -1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            if rows.numel():
                y = y.index_add(0, rows, weight[rows, place, None] * torch.tanh(expert(x[rows])))
        self.load += torch.bincount(chosen.flatten(), minlength=4)
        self.balance = (share.mean(0) * torch.zeros_like(share).scatter(1, chosen, 1).mean(0)).sum()
        self.z = self.router(x).logsumexp(-1).square().mean()
        return x + y


def _mixture(session: Session, run: Any) -> None:
    model = net_of([Experts() for _ in range(3)])
    model.run = run
    session.shard(model, *(expert for block in model.blocks for expert in block.experts), *model.blocks)  # type: ignore[union-attr]
    optimizer = sgd(model)
    for _ in range(3):
        loss = model(session.batch()).square().mean()
        (loss + sum(block.balance + 0.1 * block.z for block in model.blocks)).backward()
        session.step(optimizer, model)


@recipe
def mixture_of_experts(session: Session) -> None:
    _mixture(session, lambda block, x: block(x))


@recipe
def mixture_of_experts_recomputed(session: Session) -> None:
    _mixture(session, recomputed)


@recipe
def everything_is_an_attribute(session: Session) -> None:
    """Among them a copy of a parameter; views of one are refused."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.flat = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH * WIDTH) / 6)

        def forward(self, x: Tensor) -> Tensor:
            self.x, self.kernel = x, self.flat.view(WIDTH, WIDTH).clone()
            self.hidden = self.linear(self.x) @ self.kernel
            return torch.tanh(self.hidden) @ self.linear.weight.t()

    model = net_of([Block() for _ in range(3)])
    train(session, model, *model.blocks)
    with torch.no_grad():
        session.note("evaluation", model(session.batch()))
    model.run = recomputed
    model(session.batch()).square().mean().backward()
    session.step(sgd(model), model)


@recipe
def trained_key_cache(session: Session) -> None:
    """Keys of one forward are in the graph of the next: one backward goes through both."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.cache = nn.Linear(WIDTH, 3 * WIDTH), []  # type: ignore[var-annotated]

        def forward(self, x: Tensor) -> Tensor:
            query, *key_and_value = self.qkv(x).chunk(3, -1)
            self.cache.append(key_and_value)
            key, value = (torch.cat(parts, 1) for parts in zip(*self.cache, strict=True))
            return x + F.scaled_dot_product_attention(query, key, value)

    model = net_of([Attention() for _ in range(3)])
    session.shard(model, *model.blocks)
    optimizer = sgd(model)
    for _ in range(3):
        for block in model.blocks:
            block.cache.clear()
        outputs = [model(session.batch(2, 3, WIDTH)) for _ in range(3)]
        (outputs[0].square().mean() + outputs[2].square().mean()).backward()
        session.step(optimizer, model)
