"""State dicts against stock's: the same keys, placements and shards, exchanged both ways, directly and through DCP."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support import run_ranks
from tests.support.parity import CANDIDATE, OPTIMIZERS, STOCK, Case, build, load_api, shard, sum_in_rank_order
from tests.support.schedules import Run, plain
from tests.support.trace import Trace, assert_same

DIRECTIONS = [(STOCK, CANDIDATE), (CANDIDATE, STOCK)]
CASES = [
    (1, Case("mlp", ())),
    (3, Case("transformer", ())),
    (4, Case("frozen", ("grouped",))),
    (2, Case("transformer", ("dim_1",))),
    (3, Case("mixed_dtypes", ())),
    (4, Case("mlp", ("hsdp_2",))),
    (2, Case("mlp", ("offload", "bfloat16"))),
]


def name_of(value: object) -> str | None:
    return "-".join([value.model, *value.features]) if isinstance(value, Case) else None


all_cases = pytest.mark.parametrize(("world_size", "case"), CASES, ids=name_of)
both_ways = pytest.mark.parametrize(("source", "target"), DIRECTIONS, ids=["from stock", "to stock"])


class Trained:
    """A model and an optimizer after a few steps with one engine, and the means to go on."""

    def __init__(self, rank: int, world_size: int, case: Case, engine: str, steps: int) -> None:
        self.api = load_api(engine)
        self.model = build(case)
        if steps == 0:
            _scramble(self.model)
        shard(self.model, case, self.api, world_size)
        if engine == STOCK:
            sum_in_rank_order(self.model)
        for feature in case.chosen:
            feature.prepare(self.model, self.api, case.spec)
        trainable = (p for p in self.model.parameters() if p.requires_grad)
        self.optimizer = OPTIMIZERS[case.optimizer](trainable)
        self.run = Run(rank, self.api, case.spec, self.model, self.optimizer, Trace())
        for step in range(steps):
            plain(self.run, step)

    def observe(self, with_optimizer: bool = True) -> Trace:
        """Record the state, then one more training step."""
        self.run.trace = trace = Trace()
        trace.add_tree("state dict", dict(self.model.state_dict()))
        if with_optimizer:
            trace.add_tree("optimizer", self.optimizer.state_dict())
        plain(self.run, 9)
        trace.add_parameters("after one more step", self.model)
        return trace


def _scramble(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(3)


def exchange(rank: int, world_size: int, case: Case, source: str, target: str, assign: bool) -> None:
    """Load the state dict of a trained model of one engine into a fresh one of the other, strictly."""
    trained = Trained(rank, world_size, case, source, steps=2)
    fresh = Trained(rank, world_size, case, target, steps=0)
    state = {key: value.detach().clone() for key, value in trained.model.state_dict().items()}
    result = fresh.model.load_state_dict(state, strict=True, assign=assign)
    assert result.missing_keys == [] == result.unexpected_keys
    fresh.optimizer = fresh.run.optimizer = OPTIMIZERS[case.optimizer](
        p for p in fresh.model.parameters() if p.requires_grad
    )
    trained.optimizer = trained.run.optimizer = OPTIMIZERS[case.optimizer](
        p for p in trained.model.parameters() if p.requires_grad
    )
    assert_same(trained.observe(), fresh.observe())


def exchange_optimizer(rank: int, world_size: int, case: Case, source: str, target: str) -> None:
    """The optimizer's own state dict as well; a copy of it, as loading keeps the tensors that it is given."""
    trained = Trained(rank, world_size, case, source, steps=2)
    fresh = Trained(rank, world_size, case, target, steps=0)
    fresh.model.load_state_dict(trained.model.state_dict())
    fresh.optimizer.load_state_dict(_cloned(trained.optimizer.state_dict()))
    assert_same(trained.observe(), fresh.observe())


def _cloned(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


@both_ways
@all_cases
def test_load_state_dict(case: Case, source: str, target: str, world_size: int) -> None:
    run_ranks(world_size, exchange, case, source, target, False)


@both_ways
@pytest.mark.parametrize("features", [("grouped",), ("offload", "bfloat16")])
def test_load_state_dict_assigns(source: str, target: str, features: tuple[str, ...]) -> None:
    run_ranks(3, exchange, Case("mlp", features), source, target, True)


@both_ways
@pytest.mark.parametrize(("optimizer", "world_size"), [("sgd", 3), ("adamw", 2)])
def test_load_optimizer_state_dict(source: str, target: str, optimizer: str, world_size: int) -> None:
    run_ranks(world_size, exchange_optimizer, Case("mlp", optimizer=optimizer), source, target)
