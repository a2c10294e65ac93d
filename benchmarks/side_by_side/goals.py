"""The ratios that shardkit is to reach against each system, by workload and world size, on a CPU with gloo."""

from dataclasses import dataclass

from side_by_side.ratios import Row
from side_by_side.run import Settings


@dataclass(frozen=True)
class Goal:
    """`row` of `workload` at `world_size`: the median ratio against `against` is to be at most `limit`."""

    workload: str
    world_size: int
    row: str
    against: str
    limit: float
    optimizer: str = "adamw"
    link: str | None = None


GOALS: tuple[Goal, ...] = (
    Goal("gpt-34m", 2, "step", "fsdp2", 0.55),
    Goal("gpt-34m", 2, "step", "fsdp1", 0.75),
    Goal("gpt-34m", 2, "step", "ddp", 0.90),
    Goal("gpt-34m", 2, "step", "alone", 1.20),
    Goal("gpt-34m", 2, "held", "fsdp2", 0.55),
    Goal("gpt-34m", 2, "held", "ddp", 0.60),
    Goal("gpt-34m-bf16", 2, "step", "fsdp2", 0.60),
    Goal("gpt-34m", 4, "step", "fsdp2", 0.55),
    Goal("deep-narrow", 1, "step", "fsdp2", 0.50),
    Goal("deep-narrow", 1, "hooks", "fsdp2", 0.35),
    Goal("deep-narrow", 2, "step", "fsdp2", 0.50),
    Goal("lora", 2, "step", "fsdp2", 0.60),
    Goal("uneven", 2, "step", "fsdp2", 0.60),
    Goal("moe-like", 2, "step", "fsdp2", 0.60),
    Goal("gpt-6m", 2, "optimizer", "alone", 1.2 / 2, "muon"),
    Goal("gpt-6m", 2, "optimizer", "fsdp2", 1.00, "muon"),
    Goal("gpt-6m", 4, "optimizer", "alone", 1.2 / 4, "muon"),
    Goal("gpt-6m", 4, "optimizer", "fsdp2", 1.00, "muon"),
    Goal("gpt-6m", 4, "step", "fsdp2", 0.60, "muon", "1gbit"),
)


def configurations(optimizer: str, link: str | None) -> list[tuple[str, int]]:
    """Every (workload, world size) that has a goal with this optimizer over this link, in order."""
    return list(dict.fromkeys((g.workload, g.world_size) for g in GOALS if (g.optimizer, g.link) == (optimizer, link)))


def on_gpus(count: int) -> list[tuple[str, int]]:
    """The configurations for `count` GPUs of one machine: a model that fills them, and one that the host bounds."""
    return [("llama-1b", max(1, count)), ("deep-narrow", 1)]


def judged(rows: list[Row], settings: Settings) -> list[tuple[Goal, float]]:
    """The goals of a configuration with the median ratios that were measured."""
    configuration = (settings.workload, settings.world_size, settings.optimizer, settings.link)
    measured = {(row.key, name): ratio.median for row in rows for name, ratio in row.ratios.items()}
    return [
        (goal, measured[goal.row, goal.against])
        for goal in GOALS
        if (goal.workload, goal.world_size, goal.optimizer, goal.link) == configuration
        and (goal.row, goal.against) in measured
    ]
