"""A model on each layout of parameters, for the tests of its checkpoints."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardkit.core import Blocks, Owned, plan_owners
from tests.support import rank_mesh
from tests.support.sharding import shard_each


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 10)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.cube = nn.Parameter(torch.randn(3, 5, 2))
        self.register_buffer("counts", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x)
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return y.sum() * self.cube.square().sum()


def choose_for(layout: str, model: nn.Module) -> Any:
    return {
        "shard": lambda p: Shard(0),
        "owned": plan_owners(model, lambda p: Owned() if p.ndim > 1 else None),
        "rows": lambda p: Blocks(rows=3),
        "elements": lambda p: Blocks(elements=2 if p.ndim == 3 else 7),
    }[layout]


def build(layout: str, world_size: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Net()
    mesh, choose = rank_mesh((world_size,)), choose_for(layout, model)
    return shard_each(*model.layers, model, mesh=mesh, shard_placement_fn=choose)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randint(11, (4,), generator=torch.Generator().manual_seed(step))
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: torch.Tensor) -> torch.Tensor:
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything as whole tensors, by way of the parameters: an owner's state is sent to all."""
    found = {name: whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state.get(parameter, {}).get(key)
            found[f"{name}.{key}"] = whole(torch.zeros_like(parameter) if value is None else value)
    return found


def same(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(seen[name], value), name
