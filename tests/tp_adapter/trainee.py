"""A tensor-parallel model in training, and its state."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor.debug import CommDebugMode

import shardkit.core as shardkit
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from shardkit.tp_adapter import CheckedLoadPlanner
from tests.core.checkpoint.trainee import whole
from tests.tp_adapter.models import SPECS, axes, shard


@dataclass
class Trainee:
    """A sharded model, with an optimizer; ``loss(model, seed)`` is that of a micro-batch."""

    model: Any
    loss: Callable[[Any, int], torch.Tensor]

    def __post_init__(self) -> None:
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], seed: int, api: Any = shardkit, **options: Any) -> "Trainee":
        torch.manual_seed(seed)
        model = SPECS[name].build()
        data, tensor = axes(shape)
        SPECS[name].parallelize(model, tensor)
        shard(model, api, data, **options)
        return cls(model, SPECS[name].loss).trained(seed)

    def trained(self, seed: int) -> "Trainee":
        """Itself, after a step."""
        self.loss(self.model, seed).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def save(self, path: Path) -> None:
        with CommDebugMode() as communication:
            dcp.save(self.state(), checkpoint_id=path)
        functional = [str(op) for op in communication.get_comm_counts() if "functional" in str(op)]
        assert not functional, f"saving redistributes: {functional}"

    def load(self, path: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path, planner=CheckedLoadPlanner())
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def save_by_manager(self, path: Path) -> None:
        CheckpointManager(path).save(1, TrainingState(self.model, self.optimizer), blocking=True)

    def load_by_manager(self, path: Path) -> None:
        """Into an optimizer that has taken no step."""
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        assert CheckpointManager(path).restore(TrainingState(self.model, self.optimizer)) is not None

    def full(self) -> dict[str, torch.Tensor]:
        """Everything, gathered (collective)."""
        state = self.state()
        tensors = {f"model.{fqn}": value for fqn, value in state["model"].items()}
        for fqn, states in state["optimizer"]["state"].items():
            tensors |= {f"optimizer.{fqn}.{key}": value for key, value in states.items()}
        return {name: whole(value) for name, value in tensors.items()}
