"""The part of a job that a rank holds: axes mean what their names say; owners hold whole matrices."""

from functools import partial

import pytest
import torch

from shardkit.tools import Estimate, Policies, TrainingJob, estimate_job
from shardkit.tools.command import main
from shardkit.tools.estimating.hf import cut_projections
from shardkit.tools.estimating.job import muon, muon_placements
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


RANKS = 4


def model() -> LlamaShaped:
    return LlamaShaped(128, 32, 80, 3, 4, 2)


OWNED = TrainingJob(
    model,
    lambda: torch.randint(128, (2, 16)),
    optimizer=muon,
    policies=Policies(placements=muon_placements, checkpoint=True),
)


def test_each_rank_holds_what_it_owns():
    held = [
        estimate_job(OWNED, RANKS, "h100", rank=rank).peak.by_category["sharded_parameters"] for rank in range(RANKS)
    ]
    made = model()
    plan = muon_placements(made).plan
    sizes = dict.fromkeys(range(RANKS), 0)
    for name, rank in zip(plan.names, plan.owners(RANKS), strict=True):
        sizes[rank] += made.get_parameter(name).nbytes
    assert [nbytes - held[0] for nbytes in held] == [sizes[rank] - sizes[0] for rank in range(RANKS)]


def test_a_plan_keeps_the_placements(tmp_path, capsys):
    code = tmp_path / "shard.py"
    arguments = ["tests.tools.test_estimating_meshes:OWNED", "--world-size", "2", "--most-micro-batch", "2"]
    assert main(["plan", *arguments, "--count", "1", "--write", str(code)]) == 0
    text = code.read_text()
    assert "placements = placements_for(model, torch.optim.Muon)" in text
    assert text.count("shard_placement_fn=placements") == 2
    compile(text, str(code), "exec")


def test_muon_needs_placements(capsys):
    name = "tests.tools.test_estimating_meshes:"
    arguments = [f"{name}model", "--vocabulary", "128", "--sequence", "16", "--world-size", "4", "--optimizer", "muon"]
    assert main(["estimate", *arguments]) == 2
    assert "add --placements auto" in capsys.readouterr().err
    assert main(["estimate", *arguments[:-1], "tests.tools.jobs:sgd", "--placements", "auto"]) == 2
    assert "--placements auto knows what suits" in capsys.readouterr().err
