"""Small sharded models, trained for a few steps, which the tests of checkpoints save and restore."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core import fully_shard
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from tests.support import rank_mesh


class Network(nn.Module):
    """Uneven rows, rows fewer than ranks, a tied weight, a 0-dim parameter, a buffer, bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.inner = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
        self.small = nn.Linear(7, 2, bias=False)
        self.low = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.inner(x) * self.scale
        self.seen += 1
        extra = self.small(x).sum() + self.low(x.to(torch.bfloat16)).float().sum()
        return self.head(x).square().mean() + 0.01 * extra


class Loader:
    """A position in data that differs from rank to rank, and nested state with odd keys."""

    def __init__(self, rank: int) -> None:
        self.position = 100 * rank
        self.workers: dict[Any, Any] = {0: {"at": 1.5}, "none": {}, "list": [torch.arange(3), {"x": (1, "y")}]}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "workers": self.workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.workers = state["position"], state["workers"]


class ElasticLoader(Loader):
    """A loader whose position can be distributed over another number of ranks."""

    def load_state_dicts(self, states: dict[int, dict[str, Any]]) -> None:
        self.position = sum(state["position"] for state in states.values())


class Held:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Average(Held):
    """A moving average of the weights: user state with DTensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__({"values": {name: p.detach().clone() for name, p in model.named_parameters()}, "count": 0})

    def update(self, model: nn.Module) -> None:
        self.state["count"] += 1
        for name, p in model.named_parameters():
            self.state["values"][name].mul_(0.5).add_(p.detach(), alpha=0.5)


@dataclass
class Trainee:
    mesh_shape: tuple[int, ...]
    seed: int = 0
    loader_kind: type[Loader] = Loader
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.mesh = rank_mesh(self.mesh_shape, ("replicate", "shard")[-len(self.mesh_shape) :])
        self.rank = self.mesh.get_rank()
        self.model = Network()
        for module in (self.model.inner, self.model):
            fully_shard(module, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in self.model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=0.05,
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.loader = self.loader_kind(self.rank)
        self.average = Average(self.model)

    @property
    def state(self) -> TrainingState:
        return TrainingState(
            self.model, self.optimizer, self.scheduler, {"average": self.average}, {"loader": self.loader}
        )

    def train(self, steps: int) -> None:
        """Takes steps. Their data depends on every random generator and on the loader's position."""
        for _ in range(steps):
            self.loader.position += random.randrange(5) + int(np.random.randint(5))
            self.loader.workers[0]["at"] += 0.25
            tokens = (torch.randint(11, (4,)) + self.loader.position) % 11
            loss = self.model(tokens)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.average.update(self.model)
            self.losses.append(loss.item())

    def full(self) -> dict[str, Any]:
        """Everything that does not depend on the rank, gathered, in plain values. Collective."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        values = {f"model.{name}": whole(one) for name, one in self.model.state_dict().items()}
        for p, state in self.optimizer.state.items():
            values |= {f"optimizer.{names[id(p)]}.{key}": whole(one) for key, one in state.items()}
        values |= {f"average.{name}": whole(one) for name, one in self.average.state["values"].items()}
        values["groups"] = [
            {key: one for key, one in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        values["scheduler"] = self.scheduler.state_dict()
        values["count"] = self.average.state["count"]
        return values

    def own(self) -> dict[str, Any]:
        """The state that belongs to this rank alone."""
        return {"loader": self.loader.state_dict(), "draws": (random.random(), np.random.rand(), torch.rand(2))}


def save_trained(rank: int, world_size: int, path: Path | str, shape: tuple[int, ...], *steps: int) -> list[Any]:
    """Saves after these steps; returns the state, and the position of the loader, after each."""
    trainee, states = Trainee(shape, seed=1, loader_kind=ElasticLoader), []
    with CheckpointManager(path) as manager:
        for step in steps:
            trainee.train(step - len(trainee.losses))
            manager.save(step, trainee.state, info={"note": "x"})
            states.append((trainee.full(), trainee.loader.position))
    return states


def restore(rank: int, world_size: int, path: Path | str, source: Path | None = None) -> Any:
    """The state that another trainee has then."""
    trainee = Trainee((world_size,), seed=2, loader_kind=ElasticLoader)
    assert CheckpointManager(path).restore(trainee.state, source=source) is not None
    return trainee.full()


def whole(value: Any) -> Any:
    """A copy of a tensor, gathered if it is sharded, or a plain value."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


class Extra(nn.Module):
    """A module whose state dict has more than tensors, and not its buffer."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def saved(path: Path | str, state: TrainingState, *steps: int, **options: Any) -> CheckpointManager:
    """A manager of that directory that has saved the state at each step."""
    manager = CheckpointManager(path, **options)
    for step in steps:
        manager.save(step, state, blocking=True)
    return manager


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part; of a plain tensor all of it."""
    return value.to_local() if isinstance(value, DTensor) else value
