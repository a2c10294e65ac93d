"""Estimates of placements that keep matrices whole, against core's plan."""

import torch

from shardkit.tools import Policies, TrainingJob, estimate_job
from shardkit.tools.command import main
from shardkit.tools.estimating.job import muon, muon_placements
from tests.tools.llama_shaped import LlamaShaped

RANKS = 4


def model() -> LlamaShaped:
    return LlamaShaped(128, 32, 80, 3, 4, 2)


JOB = TrainingJob(
    model,
    lambda: torch.randint(128, (2, 16)),
    optimizer=muon,
    policies=Policies(placements=muon_placements, checkpoint=True),
)


def test_each_rank_holds_what_it_owns():
    held = [estimate_job(JOB, RANKS, "h100", rank=rank).peak.by_category["sharded_parameters"] for rank in range(RANKS)]
    made = model()
    plan = muon_placements(made).plan
    sizes = dict.fromkeys(range(RANKS), 0)
    for name, rank in zip(plan.names, plan.owners(RANKS), strict=True):
        sizes[rank] += made.get_parameter(name).nbytes
    assert [nbytes - held[0] for nbytes in held] == [sizes[rank] - sizes[0] for rank in range(RANKS)]


def test_a_plan_keeps_the_placements(tmp_path, capsys):
    code = tmp_path / "shard.py"
    arguments = ["tests.tools.test_estimating_owners:JOB", "--world-size", "2", "--most-micro-batch", "2"]
    assert main(["plan", *arguments, "--count", "1", "--write", str(code)]) == 0
    text = code.read_text()
    assert "placements = placements_for(model, torch.optim.Muon)" in text
    assert text.count("shard_placement_fn=placements") == 2
    compile(text, str(code), "exec")


def test_muon_needs_placements(capsys):
    name = "tests.tools.test_estimating_owners:"
    arguments = [f"{name}model", "--vocabulary", "128", "--sequence", "16", "--world-size", "4", "--optimizer", "muon"]
    assert main(["estimate", *arguments]) == 2
    assert "add --placements auto" in capsys.readouterr().err
    assert main(["estimate", *arguments[:-1], "tests.tools.jobs:sgd", "--placements", "auto"]) == 2
    assert "--placements auto knows what suits" in capsys.readouterr().err
