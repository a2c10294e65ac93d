"""Training with our fully_shard against stock's: every feature alone, on every world size it means something on."""

from typing import Any

import pytest

from tests.support import run_ranks
from tests.support.features import FEATURES, model_for, runs_on
from tests.support.models import MODELS
from tests.support.parity import Case, compare_training, compare_with_single_process

WORLD_SIZES = (1, 2, 3, 4)


def _singles() -> list[Any]:
    """Every feature on every world size it runs on. By day on three ranks, else on the fewest it runs on."""
    cases = []
    for name in FEATURES:
        sizes = [size for size in WORLD_SIZES if runs_on((name,), size)]
        by_day = 3 if 3 in sizes else sizes[0]
        cases += [pytest.param(size, name, marks=() if size == by_day else pytest.mark.slow) for size in sizes]
    return cases


@pytest.mark.daily(world_size=[1, 3])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_model(model: str, world_size: int) -> None:
    run_ranks(world_size, compare_training, Case(model, gather=True))


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("mlp", "adamw"), ("transformer", "adamw_fused"), ("frozen", "adamw_fused"), ("nested_outputs", "adamw")],
)
def test_optimizer(model: str, optimizer: str, world_size: int) -> None:
    run_ranks(world_size, compare_training, Case(model, optimizer=optimizer))


@pytest.mark.parametrize(("world_size", "feature"), _singles())
def test_feature(feature: str, world_size: int) -> None:
    run_ranks(world_size, compare_training, Case(model_for((feature,)), (feature,)))


@pytest.mark.parametrize(
    "case",
    [
        Case("transformer", ("reshard_to_2", "dim_1")),
        Case("transformer", ("reshard_to_2",)),
        Case("mlp", ("replicate_only",)),
        Case("mlp", ("hsdp_2", "offload")),
        Case("transformer", ("dim_1", "hsdp_2", "no_reshard")),
    ],
    ids=lambda case: "-".join([case.model, *case.features]),
)
def test_single_process_of_features(case: Case) -> None:
    """Features that stock lacks, or does not have bit for bit, are compared with a single process as well."""
    run_ranks(4, compare_with_single_process, case)
