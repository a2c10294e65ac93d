"""Training against stock's with two features at once: every pair of the main ones, the others with a few each.

The pairs are dealt out to the world sizes in turn: each runs on one of those that both features mean something on.
"""

import itertools

import pytest

from tests.support import run_ranks
from tests.support.features import FEATURES, can_pair, model_for, runs_on
from tests.support.parity import Case, compare_training

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
COMPANIONS = ("no_reshard", "bfloat16_reduce_float32", "hsdp_2", "accumulate_no_sync")


def _deal_out() -> list[tuple[int, str, str]]:
    pairs = [*itertools.combinations(MAIN, 2), *itertools.product(OTHERS, COMPANIONS)]
    dealt = []
    for turn, pair in enumerate(pair for pair in pairs if can_pair(*pair)):
        world_sizes = [size for size in (2, 3, 4) if runs_on(pair, size)]
        if world_sizes:
            dealt.append((world_sizes[turn % len(world_sizes)], *pair))
    return sorted(dealt)


@pytest.mark.parametrize(("world_size", "first", "second"), _deal_out())
def test_pair(first: str, second: str, world_size: int) -> None:
    model = model_for((first, second), preferred="transformer" if world_size == 4 else "mlp")
    run_ranks(world_size, compare_training, Case(model, (first, second), steps=2))
