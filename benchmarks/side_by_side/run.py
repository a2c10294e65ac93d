"""One comparison: build all systems, check that they agree, take turns, count."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from side_by_side.crew import Crew, started
from side_by_side.link import shaped_link
from side_by_side.networks import WORKLOADS
from side_by_side.rank import Agreement, Times

CHECKED_STEPS = 3
LOSS_TOLERANCE = {False: 1e-4, True: 2e-2}
"""Relative, by whether anything is computed in low precision: bfloat16 (systems that autocast round at other places),
Muon (it orthogonalises in bfloat16 sums of another order), compression."""
GRAD_NORM_TOLERANCE = {False: 1e-3, True: 5e-2}

Say = Callable[[str], None]


class Disagreement(RuntimeError):
    """Two systems do not compute the same; nothing about their speed can be said."""


@dataclass(frozen=True)
class Settings:
    """A comparison. `steps` are timed in each of `rounds` turns.

    `link`: the rate of a link between two halves of the ranks, or None for the loopback interface.
    """

    workload: str
    world_size: int
    systems: tuple[str, ...]
    device: str = "cpu"
    rounds: int = 7
    steps: int = 3
    warmup: int = 2
    optimizer: str = "adamw"
    link: str | None = None

    def __post_init__(self) -> None:
        if WORKLOADS[self.workload].gpu_only and self.device == "cpu":
            raise ValueError(f"{self.workload} is for GPUs; run it with --device cuda")
        if self.link and (self.world_size % 2 or self.device != "cpu"):
            raise ValueError("--link needs an even number of CPU ranks: half of them are at each end")
        if self.optimizer == "muon" and "fsdp1" in self.systems:
            raise ValueError("FSDP1 flattens matrices, which Muon needs: leave fsdp1 out of --systems")

    @property
    def low_precision(self) -> bool:
        return WORKLOADS[self.workload].bf16 or self.optimizer == "muon" or "shardkit-int8" in self.systems


@dataclass(frozen=True)
class Measured:
    """The measurements of one system's ranks.

    `rounds` holds one entry for each turn: of `step` and the optimizer the slowest rank's, of everything else the mean
    over the ranks.
    `peaks` covers the steps that are timed; bytes, largest over the ranks.
    """

    agreement: list[Agreement]
    rounds: list[Times]
    peaks: dict[str, int]
    traffic: dict[str, Any]


def compare(settings: Settings, say: Say) -> dict[str, Measured]:
    """Measure all systems in turn. Raises `Disagreement` before anything is timed, `CrewFailure` for a failed rank."""
    say(f"{settings.workload}, {settings.world_size} ranks, {settings.device}: starting {', '.join(settings.systems)}")
    trained = (settings.workload, settings.optimizer, settings.world_size, settings.device)
    with (
        shaped_link(settings.link) if settings.link else nullcontext() as sides,
        started(settings.systems, *trained, sides) as crews,
    ):
        agreements = {crew.system: crew.ask("first_steps", CHECKED_STEPS) for crew in crews}
        say(check(agreements, settings))
        for _ in range(settings.warmup):
            for crew in crews:
                crew.ask("turn", settings.steps)
        for crew in crews:
            crew.ask("restart_peaks")
        rounds = _take_turns(crews, settings, say)
        peaks = {crew.system: _largest(crew.ask("peaks")) for crew in crews}
        traffic = {crew.system: _per_rank(crew.ask("traffic")) for crew in crews}
    return {name: Measured(agreements[name], rounds[name], peaks[name], traffic[name]) for name in settings.systems}


def check(agreements: dict[str, list[Agreement]], settings: Settings) -> str:
    """Compare every system with the first one that averages gradients over the ranks; return a text that says so.

    A system that does not average (`alone`) sees its own data only: from its second step on, it is comparable only at
    world size 1.
    """
    loss_tolerance = LOSS_TOLERANCE[settings.low_precision]
    norm_tolerance = GRAD_NORM_TOLERANCE[settings.low_precision]
    reference = next((name for name, ranks in agreements.items() if ranks[0].averages), next(iter(agreements)))
    worst_loss = worst_norm = 0.0
    for name, ranks in agreements.items():
        full = ranks[0].averages or settings.world_size == 1
        for rank, (mine, theirs) in enumerate(zip(ranks, agreements[reference], strict=True)):
            pairs = list(zip(mine.losses, theirs.losses, strict=True))[: None if full else 1]
            for step, (seen, expected) in enumerate(pairs):
                off = _require_close(
                    seen, expected, loss_tolerance, f"{name}, rank {rank}: loss of step {step}", reference
                )
                worst_loss = max(worst_loss, off)
            if full:
                what = f"{name}, rank {rank}: norm of the first gradient"
                off = _require_close(mine.grad_norm, theirs.grad_norm, norm_tolerance, what, reference)
                worst_norm = max(worst_norm, off)
    return (
        f"agreement with {reference} over {CHECKED_STEPS} steps: losses within {worst_loss:.1e} "
        f"(allowed {loss_tolerance:g}), norm of the first gradient within {worst_norm:.1e} (allowed {norm_tolerance:g})"
    )


def _require_close(seen: float, expected: float, tolerance: float, what: str, reference: str) -> float:
    off = abs(seen - expected) / abs(expected) if expected else abs(seen)
    if not math.isfinite(seen) or off > tolerance:
        raise Disagreement(f"{what} is {seen:.6g}, but {expected:.6g} in {reference}; allowed are {tolerance:g} of it")
    return off


def _take_turns(crews: Sequence[Crew], settings: Settings, say: Say) -> dict[str, list[Times]]:
    rounds: dict[str, list[Times]] = {crew.system: [] for crew in crews}
    for index in range(settings.rounds):
        for crew in crews:
            rounds[crew.system].append(_joined(crew.ask("turn", settings.steps)))
        latest = "  ".join(f"{name} {times[-1].step * 1e3:.0f}" for name, times in rounds.items())
        say(f"round {index + 1} of {settings.rounds}, ms a step: {latest}")
    return rounds


def _joined(ranks: Sequence[Times]) -> Times:
    joined = {name: sum(getattr(times, name) for times in ranks) / len(ranks) for name in vars(ranks[0])}
    for slowest in ("step", "optimizer_cpu"):  # ranks that own fewer matrices than others wait for them
        joined[slowest] = max(getattr(times, slowest) for times in ranks)
    return Times(**joined)


def _largest(ranks: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: max(peaks[name] for peaks in ranks) for name in ranks[0]}


def _per_rank(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of rank 0; socket bytes as the mean over the ranks, as a tree or ring loads them differently; peaks as the
    largest.
    """
    joined = dict(ranks[0])
    if "wire" in joined:
        joined["wire"] = sum(counts["wire"] for counts in ranks) // len(ranks)
    if "held" in joined:
        joined["held"] = max(counts["held"] for counts in ranks)
    return joined
