"""Where unsharded parameters lie, step by step, by an allocator that works as torch's caching one does."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.simulation.configurations import Configuration, optimize
from tests.simulation.device import Observer
from tests.simulation.model import Block
from tests.simulation.training import started, take_steps


class Addresses(Observer):
    """Notes for each computation of a block its name and the addresses of the parameters that it reads."""

    def __init__(self) -> None:
        self.blocks: dict[str, Any] = {}
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def computed(self, stream: int, cost: float, what: str) -> None:
        weights = list(self.blocks[what.rpartition(" ")[0]].weights)
        assert not any(isinstance(weight, DTensor) for weight in weights), what
        self.seen.append((what, tuple(weight.data_ptr() for weight in weights)))


def addresses(configuration: Configuration, engine: str = "ours") -> list[list[tuple[str, tuple[int, ...]]]]:
    observer, steps = Addresses(), []
    with started(configuration.scenario, engine, observer, lambda: 0.0) as run:
        observer.blocks = {block.name: block for block in run.model.modules() if isinstance(block, Block)}
        run.optimizer = torch.optim.SGD([one for one in run.model.parameters() if one.requires_grad], lr=0.1)
        for _ in take_steps(run):
            if "stepped" not in run.kept:
                optimize(run)
            steps.append(observer.seen)
            observer.seen = []
    return steps
