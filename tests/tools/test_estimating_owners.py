"""Estimates of placements that keep matrices whole, against core's plan and against each rank's own estimate."""

import torch

from shardkit.core import Owned
from shardkit.tools import Policies, TrainingJob, estimate_job
from shardkit.tools.command import main
from shardkit.tools.estimating.job import muon, muon_placements
from tests.tools.llama_shaped import LlamaShaped

RANKS = 4


def model() -> LlamaShaped:
    return LlamaShaped(128, 32, 80, 3, 4, 2)


JOB = TrainingJob(
    model, lambda: torch.randint(128, (2, 16)), optimizer=muon, policies=Policies(placements=muon_placements)
)


def optimizer_seconds(found) -> float:
    return sum(one.end - one.begin for one in found.timeline.spans if (one.lane, one.phase) == ("compute", "optimizer"))


def test_bytes_by_rank_and_the_slowest_ranks_optimizer():
    found = [estimate_job(JOB, RANKS, "h100", rank=rank) for rank in range(RANKS)]
    shares = found[0].owners
    assert all(one.owners == shares for one in found)  # whichever rank was estimated
    assert list(shares.bytes) == [one.peak.by_category["sharded_parameters"] for one in found]
    made = model()
    plan = muon_placements(made).plan
    assert shares.imbalance == plan.imbalance(RANKS)
    owned = {name for name, rank in zip(plan.names, plan.owners(RANKS), strict=True) if rank == shares.slowest}
    assert set(shares.largest) == owned
    times = [optimizer_seconds(one) for one in found]
    assert shares.optimizer_seconds == times[shares.slowest] and len(set(times)) > 1


def badly(model):
    """Rank 2 owns everything."""
    return lambda parameter: Owned(rank=2) if parameter.ndim == 2 and parameter.shape[0] < 128 else None


def test_a_plan_keeps_the_placements(tmp_path, capsys):
    code = tmp_path / "shard.py"
    arguments = ["tests.tools.test_estimating_owners:JOB", "--world-size", "2", "--most-micro-batch", "2"]
    assert main(["plan", *arguments, "--count", "1", "--write", str(code)]) == 0
    text = code.read_text()
    assert "placements = placements_for(model, torch.optim.Muon)" in text
    assert text.count("shard_placement_fn=placements") == 2
    compile(text, str(code), "exec")


def test_the_command_tells_them(capsys):
    name = "tests.tools.test_estimating_owners:"
    arguments = [f"{name}model", "--vocabulary", "128", "--sequence", "16", "--world-size", "4", "--optimizer", "muon"]
    assert main(["estimate", *arguments, "--placements", f"{name}badly"]) == 0
    shown = capsys.readouterr().out
    assert "4.000" in shown and "optimizer of the slowest rank, 2" in shown
    assert main(["estimate", *arguments]) == 2
    assert "add --placements auto" in capsys.readouterr().err
    assert main(["estimate", *arguments[:-1], "tests.tools.jobs:sgd", "--placements", "auto"]) == 2
    assert "--placements auto knows what suits" in capsys.readouterr().err
