"""Training with our fully_shard against stock's: every feature alone, and several at once.

Every feature runs alone on every world size it means something on. Every pair of the main ones is tried, and the others
with a few each: four features in one run try six pairs. The runs are dealt out to the world sizes in turn, each to one
of those that all its features mean something on. By day run those, of several features, that try another one.
"""

import itertools
from collections.abc import Container
from typing import Any

import pytest

from tests.support import run_ranks
from tests.support.features import FEATURES, can_pair, model_for, runs_on
from tests.support.models import MODELS
from tests.support.parity import Case, compare_training

WORLD_SIZES = (1, 2, 3, 4)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "world_size"), [(name, size) for name in FEATURES for size in WORLD_SIZES if runs_on((name,), size)]
)
def test_feature(feature: str, world_size: int) -> None:
    run_ranks(world_size, compare_training, Case(model_for((feature,)), (feature,)))


# -- several at once ---------------------------------------------------------------------------------------------------

MAIN = (
    "no_reshard",
    "reshard_to_2",
    "bfloat16",
    "bfloat16_reduce_float32",
    "offload",
    "hsdp_2",
    "dim_1",
    "grouped",
    "prefetch",
    "divide_by_3",
    "keep_after_backward",
    "reduce_unused",
    "accumulate",
    "accumulate_no_sync",
    "accumulate_no_all_reduce",
    "forwards_backwards",
    "one_f_one_b",
    "evaluation",
    "explicit_unshard",
    "optimizer_in_backward",
    "clipped",
)
OTHERS = tuple(name for name in FEATURES if name not in MAIN)
FEATURES_IN_A_RUN = 4
COMPANIONS = ("no_reshard", "bfloat16_reduce_float32", "hsdp_2", "accumulate_no_sync")


def _deal_out() -> list[Any]:
    """Runs that try every pair: by day those with a feature that no earlier one has."""
    pairs = [*itertools.combinations(MAIN, 2), *itertools.product(OTHERS, COMPANIONS)]
    left = dict.fromkeys(frozenset(pair) for pair in pairs if _world_sizes(pair))
    dealt: list[tuple[int, tuple[str, ...]]] = []
    while left:
        chosen = tuple(name for name in FEATURES if name in next(iter(left)))
        while len(chosen) < FEATURES_IN_A_RUN:
            more = max(FEATURES, key=lambda name: _pairs_tried((*chosen, name), left))
            if _pairs_tried((*chosen, more), left) <= _pairs_tried(chosen, left):
                break
            chosen = (*chosen, more)
        world_sizes = _world_sizes(chosen)
        dealt.append((world_sizes[len(dealt) % len(world_sizes)], chosen))
        for pair in itertools.combinations(chosen, 2):
            left.pop(frozenset(pair), None)
    tried: set[str] = set()
    cases = []
    for case in dealt:
        cases.append(pytest.param(*case, marks=pytest.mark.slow if tried.issuperset(case[1]) else ()))
        tried |= {*case[1]}
    return sorted(cases, key=lambda case: case.values)


def _world_sizes(names: tuple[str, ...]) -> list[int]:
    """World sizes on which the features can be tried together; none if two of them conflict."""
    if not all(can_pair(*pair) for pair in itertools.combinations(names, 2)) or model_for(names) is None:
        return []
    return [size for size in (2, 3, 4) if runs_on(names, size)]


def _pairs_tried(names: tuple[str, ...], left: Container[frozenset[str]]) -> int:
    """How many pairs that are still to be tried a run with these features would try."""
    if not _world_sizes(names):
        return 0
    return sum(frozenset(pair) in left for pair in itertools.combinations(names, 2))


@pytest.mark.parametrize(
    ("world_size", "features"),
    _deal_out(),
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_together(features: tuple[str, ...], world_size: int) -> None:
    model = model_for(features, preferred="transformer" if world_size == 4 else "mlp")
    run_ranks(world_size, compare_training, Case(model, features, steps=2))
