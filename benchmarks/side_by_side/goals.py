"""The ratios that shardkit is to reach against each system, by workload and world size, on a CPU with gloo."""

from dataclasses import dataclass

from side_by_side.ratios import Row


@dataclass(frozen=True)
class Goal:
    """`row` of `workload` at `world_size`: the median ratio against `against` is to be at most `limit`."""

    workload: str
    world_size: int
    row: str
    against: str
    limit: float


GOALS: tuple[Goal, ...] = (
    Goal("gpt-34m", 2, "step", "fsdp2", 0.55),
    Goal("gpt-34m", 2, "step", "fsdp1", 0.75),
    Goal("gpt-34m", 2, "step", "ddp", 0.90),
    Goal("gpt-34m", 2, "step", "alone", 1.20),
    Goal("gpt-34m", 2, "held", "fsdp2", 0.55),
    Goal("gpt-34m", 2, "held", "ddp", 0.60),
    Goal("gpt-34m-bf16", 2, "step", "fsdp2", 0.55),
    Goal("gpt-34m", 4, "step", "fsdp2", 0.55),
    Goal("deep-narrow", 1, "step", "fsdp2", 0.50),
    Goal("deep-narrow", 1, "hooks", "fsdp2", 0.35),
    Goal("deep-narrow", 2, "step", "fsdp2", 0.50),
    Goal("lora", 2, "step", "fsdp2", 0.60),
    Goal("uneven", 2, "step", "fsdp2", 0.60),
    Goal("moe-like", 2, "step", "fsdp2", 0.60),
)


def configurations() -> list[tuple[str, int]]:
    """Every (workload, world size) that has a goal, in order."""
    return list(dict.fromkeys((goal.workload, goal.world_size) for goal in GOALS))


def judged(rows: list[Row], workload: str, world_size: int) -> list[tuple[Goal, float]]:
    """The goals of a configuration with the median ratios that were measured."""
    measured = {(row.key, name): ratio.median for row in rows for name, ratio in row.ratios.items()}
    return [
        (goal, measured[goal.row, goal.against])
        for goal in GOALS
        if (goal.workload, goal.world_size) == (workload, world_size) and (goal.row, goal.against) in measured
    ]
