"""State dicts against stock's: the same keys, placements and shards, exchanged both ways, directly and through DCP."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.support import run_ranks
from tests.support.features import FEATURES, runs_on
from tests.support.parity import CANDIDATE, OPTIMIZERS, STOCK, Case, build, load_api, shard, sum_in_rank_order
from tests.support.schedules import Run, plain
from tests.support.trace import Trace, assert_same

DIRECTIONS = [(STOCK, CANDIDATE), (CANDIDATE, STOCK)]
LAYOUTS = [
    ("mlp", ()),
    ("transformer", ()),
    ("frozen", ("grouped",)),
    ("transformer", ("dim_1",)),
    ("mixed_dtypes", ()),
    ("mlp", ("hsdp_2",)),
    ("mlp", ("offload", "bfloat16")),
]
CASES = [
    (world_size, Case(model, features))
    for world_size in (1, 2, 3, 4)
    for model, features in LAYOUTS
    if runs_on(features, world_size)
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


def exchange_by_checkpoint(rank: int, world_size: int, case: Case, source: str, target: str, directory: Path) -> None:
    """Save with one engine through torch.distributed.checkpoint, load with the other."""
    trained = Trained(rank, world_size, case, source, steps=2)
    model_state, optimizer_state = get_state_dict(trained.model, trained.optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    fresh = Trained(rank, world_size, case, target, steps=0)
    model_state, optimizer_state = get_state_dict(fresh.model, fresh.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(fresh.model, fresh.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same(trained.observe(), fresh.observe())


def states_of(trained: Trained, options: StateDictOptions) -> Trace:
    trace = Trace()
    trace.add_tree("model", get_model_state_dict(trained.model, options=options))
    trace.add_tree("optimizer", get_optimizer_state_dict(trained.model, trained.optimizer, options=options))
    return trace


def same_states(rank: int, world_size: int, case: Case, options: dict[str, Any]) -> None:
    """torch.distributed.checkpoint.state_dict returns the same for both engines."""
    expected = Trained(rank, world_size, case, STOCK, steps=2)
    seen = Trained(rank, world_size, case, CANDIDATE, steps=2)
    assert_same(states_of(expected, StateDictOptions(**options)), states_of(seen, StateDictOptions(**options)))


def restored(rank: int, world_size: int, case: Case, source: str, target: str, options: dict[str, Any]) -> None:
    """The state dicts of get_* for one engine are passed to set_* of the other."""
    choice = StateDictOptions(**options)
    trained = Trained(rank, world_size, case, source, steps=2)
    fresh = Trained(rank, world_size, case, target, steps=0)
    reading = StateDictOptions(**{k: v for k, v in options.items() if k != "broadcast_from_rank0"})
    model_state = get_model_state_dict(trained.model, options=reading)
    optimizer_state = _cloned(get_optimizer_state_dict(trained.model, trained.optimizer, options=reading))
    if options.get("broadcast_from_rank0") and rank != 0:
        model_state, optimizer_state = {}, {}
    set_model_state_dict(fresh.model, model_state, options=choice)
    set_optimizer_state_dict(fresh.model, fresh.optimizer, optimizer_state, options=choice)
    assert_same(trained.observe(), fresh.observe())


@pytest.mark.daily(world_size=[1, 3])
@both_ways
@all_cases
def test_load_state_dict(case: Case, source: str, target: str, world_size: int) -> None:
    run_ranks(world_size, exchange, case, source, target, False)


@pytest.mark.daily(world_size=[3])
@both_ways
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("features", [(), ("grouped",), ("offload", "bfloat16")])
def test_load_state_dict_assigns(source: str, target: str, features: tuple[str, ...], world_size: int) -> None:
    run_ranks(world_size, exchange, Case("mlp", features), source, target, True)


@both_ways
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_load_optimizer_state_dict(source: str, target: str, optimizer: str, world_size: int) -> None:
    run_ranks(world_size, exchange_optimizer, Case("mlp", optimizer=optimizer), source, target)


@pytest.mark.daily(world_size=[3])
@both_ways
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("features", [(), ("grouped",)])
def test_distributed_checkpoint(
    source: str, target: str, features: tuple[str, ...], world_size: int, tmp_path: Path
) -> None:
    case = Case("transformer", features, optimizer="adamw")
    run_ranks(world_size, exchange_by_checkpoint, case, source, target, tmp_path)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"full_state_dict": True},
        {"full_state_dict": True, "cpu_offload": True},
        {"ignore_frozen_params": True},
        {"flatten_optimizer_state_dict": True},
    ],
    ids="-".join,
)
def test_state_dict_helpers(options: dict[str, Any], world_size: int) -> None:
    run_ranks(world_size, same_states, Case("frozen", optimizer="adamw"), options)


@pytest.mark.daily(world_size=[3])
@both_ways
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}],
    ids="-".join,
)
def test_setters(source: str, target: str, options: dict[str, Any], world_size: int) -> None:
    run_ranks(world_size, restored, Case("transformer", optimizer="adamw"), source, target, options)


def test_layouts_name_known_features() -> None:
    assert {name for _, case in CASES for name in case.features} <= set(FEATURES)
