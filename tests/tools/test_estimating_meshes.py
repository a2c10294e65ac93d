"""Axes of a mesh mean what their names say, in any order."""

from functools import partial

import pytest

from shardkit.tools import Estimate, TrainingJob, estimate_job
from shardkit.tools.estimating.hf import cut_projections
from tests.tools.llama_shaped import LlamaShaped, few_tokens

JOB = TrainingJob(partial(LlamaShaped, 32, 64, 160, 4, 4, 2), few_tokens, tensor_parallel=cut_projections)


def _facts(mesh: dict[str, int]) -> tuple[object, ...]:
    found = estimate_job(JOB, mesh)
    return found.idle_bytes, found.peak, found.traffic, found.timeline.step, found.checkpoint


def _part(found: Estimate) -> float:
    """The part of all weights and optimizer state that the rank holds."""
    return found.checkpoint.own / found.checkpoint.whole


@pytest.mark.parametrize(
    ("mesh", "ranks", "shards"),
    [
        ({"dp_shard": 8, "dp_replicate": 2}, 16, 8),
        ({"dp_replicate": 2, "dp": 8}, 16, 8),
        ({"dp_replicate": 4}, 4, 1),
        ({"dp_shard": 4, "cp": 2}, 8, 8),
        ({"cp": 4}, 4, 4),
        ({"cp": 2, "dp_shard": 2, "dp_replicate": 2}, 8, 4),
        ({"tp": 2, "dp_replicate": 2, "dp_shard": 2}, 8, 4),
    ],
)
def test_a_rank_holds_the_part_that_the_names_say(mesh: dict[str, int], ranks: int, shards: int):
    found = estimate_job(JOB, mesh)
    assert found.axes == mesh and found.world_size == ranks
    # Norms are not cut over tp, and rounding gives rank 0 the larger rows.
    assert _part(found) == pytest.approx(1 / shards, rel=0.03)
    assert any(note.startswith("cp: ") for note in found.notes) == ("cp" in mesh)


def test_the_order_of_axes_says_nothing():
    expected = _facts({"dp_replicate": 2, "dp_shard": 2, "tp": 2})
    assert _facts({"tp": 2, "dp_shard": 2, "dp_replicate": 2}) == expected
    assert _facts({"dp_shard": 2, "tp": 2, "dp_replicate": 2}) == expected


def test_ranks_along_cp_hold_shards():
    assert _facts({"cp": 2, "dp_shard": 4}) == _facts({"dp": 8})
