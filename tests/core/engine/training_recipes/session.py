"""Recipes train with a session, which shards or does not, and with small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardkit.core import fully_shard
from tests.support.meshes import networked_mesh

WIDTH = 32  # a matrix of that width travels by itself, in place

Recipe = Callable[["Session"], None]
RECIPES: dict[str, Recipe] = {}


class Session:
    """Shards and trains for a recipe. ``shard`` does nothing in one process. Every rank has the same batches."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.seen: list[tuple[str, Tensor]] = []
        self._batches = 0

    def shard(self, model: nn.Module, *blocks: nn.Module) -> Any:
        """``fully_shard`` of the blocks, then of the model."""
        for module in (*blocks, model) if self.ranks > 1 else ():
            fully_shard(module, mesh=networked_mesh((self.ranks,)))
        return model

    def batch(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape or (8, WIDTH), generator=self._generator())

    def labels(self, classes: int, *shape: int) -> Tensor:
        """Class numbers."""
        return torch.randint(classes, shape, generator=self._generator())

    def _generator(self) -> torch.Generator:
        self._batches += 1
        return torch.Generator().manual_seed(self._batches)

    def sync(self, model: Any, on: bool) -> None:
        """Whether the backwards that follow reduce gradients."""
        if self.ranks > 1:
            model.set_requires_gradient_sync(on)

    def note(self, name: str, value: Tensor) -> None:
        """Something to compare."""
        value = value.full_tensor() if isinstance(value, DTensor) else value
        self.seen.append((name, value.detach().clone()))

    def step(self, optimizer: torch.optim.Optimizer, *models: nn.Module) -> None:
        """Notes all gradients, makes a step, and notes all parameters."""
        for index, model in enumerate(models):
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    self.note(f"gradient of {index}.{name}", parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        for index, model in enumerate(models):
            for name, parameter in model.named_parameters():
                self.note(f"{index}.{name}", parameter)


def recipe(function: Recipe) -> Recipe:
    """Registers a recipe under its name."""
    RECIPES[function.__name__] = function
    return function


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters() if p.requires_grad], lr=0.05)


def train(session: Session, model: Any, *blocks: nn.Module, steps: int = 3) -> None:
    """The plain loop, over the mean square of the output."""
    session.shard(model, *blocks)
    optimizer = sgd(model)
    for _ in range(steps):
        model(session.batch()).square().mean().backward()
        session.step(optimizer, model)


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks between two linear layers; ``run`` calls a block, ``order`` says which ones run."""

    def __init__(self, blocks: int = 2, out: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, out)
        self.blocks = nn.ModuleList(MLP(dropout) for _ in range(blocks))
        self.run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)
        self.order: tuple[int, ...] = tuple(range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in self.order:
            x = self.run(self.blocks[index], x)
        return self.out(x)


def recomputed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def net_of(blocks: list[nn.Module]) -> Net:
    """A net of other blocks."""
    net = Net(0)
    net.blocks, net.order = nn.ModuleList(blocks), tuple(range(len(blocks)))
    return net
