"""Figures of a run that fit on one line each, to compare runs and to set limits on."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardkit.tools.files import InputError
from shardkit.tools.quantities import Unit, parse_quantity, show
from shardkit.tools.report.schema import Operation, Rank, Report


def meetings(ranks: list[Rank]) -> dict[tuple[int, str, int], dict[int, Operation]]:
    """Each collective, by group, kind and number, with the operations of all ranks that saw it, by rank."""
    found: dict[tuple[int, str, int], dict[int, Operation]] = defaultdict(dict)
    for rank in ranks:
        for one in rank.operations:
            found[one.group, one.kind, one.number][rank.rank] = one
    return found


def waited_for_ranks(one: Operation, last_start: float) -> float:
    """Seconds of an operation's wait before the last rank started: skew, which no bandwidth can reduce."""
    return max(0.0, min(one.blocked, last_start - (one.end - one.exposed)))


def skew_by_rank(report: Report) -> dict[int, float]:
    """Seconds per step that each rank waited for later ranks."""
    skew = {rank.rank: 0.0 for rank in report.ranks}
    for meeting in meetings(report.ranks).values():
        last_start = max(one.start for one in meeting.values())
        for rank, one in meeting.items():
            skew[rank] += waited_for_ranks(one, last_start)
    return {rank.rank: skew[rank.rank] / max(1, len(rank.steps)) for rank in report.ranks}


def lateness(report: Report) -> dict[int, float]:
    """Mean seconds from the first rank's start of a collective to this rank's, over those that several ranks saw."""
    late: dict[int, list[float]] = {rank.rank: [] for rank in report.ranks}
    for meeting in meetings(report.ranks).values():
        if len(meeting) > 1:
            first = min(one.start for one in meeting.values())
            for rank, one in meeting.items():
                late[rank].append(one.start - first)
    return {rank: _mean(values) for rank, values in late.items()}


def times_last(report: Report) -> Counter[int]:
    """How often each rank was the last to start a collective."""
    last: Counter[int] = Counter({rank.rank: 0 for rank in report.ranks})
    for one in report.collectives:
        last.update({int(rank): count for rank, count in one.last.items()})
    return last


@dataclass(frozen=True)
class Owner:
    """A rank's whole parameters (placement `Owned`), and the seconds per step of its optimizer."""

    rank: int
    owned: dict[str, int]
    optimizer: float

    @property
    def bytes(self) -> int:
        return sum(self.owned.values())


def owners(report: Report) -> list[Owner]:
    """All ranks and what they own, largest first; empty if nothing is owned."""
    found = [
        Owner(
            rank.rank,
            dict(sorted(((fqn, size) for fqn, size in rank.owned.items() if size), key=lambda one: -one[1])),
            _mean([step.optimizer for step in rank.steps]),
        )
        for rank in report.ranks
    ]
    return found if any(rank.owned for rank in report.ranks) else []


@dataclass(frozen=True)
class Measure:
    """A figure of a run; smaller is better for all of them."""

    name: str
    unit: Unit
    meaning: str
    of: Callable[[Report], float]


def step_time(report: Report) -> float:
    """Seconds of a step: the median over steps of the slowest rank's time in each; 0 without steps."""
    times = _step_times(report)
    return statistics.median(times) if times else 0.0


def _step_times(report: Report) -> list[float]:
    steps = [[step.end - step.begin for step in rank.steps] for rank in report.ranks]
    return [max(times) for times in zip(*steps, strict=False)]


def share_of_step(report: Report, seconds: float) -> float:
    """`seconds`, a mean over the steps, as a share of the mean step; each step counts with its slowest rank.

    Not of `step_time`, the median: a single slow step that lost the seconds counts in both means.
    """
    return seconds / max(_mean(_step_times(report)), 1e-9)


def exposed_by_rank(report: Report) -> dict[int, float]:
    """Seconds per step that each rank spent waiting for communication, and on local work with arrived data."""
    return {rank.rank: _mean([step.exposed for step in rank.steps]) for rank in report.ranks}


def _exposed(report: Report) -> float:
    return max(exposed_by_rank(report).values())


def memory_in_use(report: Report) -> tuple[int, int]:
    """Most resident (or reserved) bytes and total bytes of the fullest device, or host if ranks share it.

    The total is 0 if no rank knows it.
    """
    places: dict[object, list[Rank]] = defaultdict(list)
    for rank in report.ranks:
        if rank.capacity:
            places[rank.place.boot if report.run.device == "cpu" else rank.rank].append(rank)
    found = [(sum(one.memory.resident_peak for one in some), some[0].capacity) for some in places.values()]
    return max(found, key=lambda one: one[0] / one[1], default=(0, 0))


def _most(of_rank: Callable[[Rank], float]) -> Callable[[Report], float]:
    """The value of the rank that has most."""
    return lambda report: max(map(of_rank, report.ranks))


def _per_step(of_rank: Callable[[Rank], float]) -> Callable[[Report], float]:
    return _most(lambda rank: of_rank(rank) / max(1, len(rank.steps)))


def _imbalance(report: Report) -> float:
    held = [sum(rank.shard_bytes.values()) + sum(rank.owned.values()) for rank in report.ranks]
    return max(held) / _mean([float(size) for size in held]) - 1 if any(held) else 0.0


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0


MEASURES: tuple[Measure, ...] = (
    Measure("step_time", "seconds", "a step, median over the steps of the slowest rank", step_time),
    Measure(
        "peak_memory", "bytes", "counted tensors at their peak, most of any rank", _most(lambda rank: rank.memory.peak)
    ),
    Measure(
        "resident_memory",
        "bytes",
        "resident (CPU) or reserved (device) memory, most of any rank",
        _most(lambda rank: rank.memory.resident_peak),
    ),
    Measure("exposed", "seconds", "communication that nothing hid, a step, most of any rank", _exposed),
    Measure(
        "exposed_share", "share", "the same as a share of the mean step", lambda one: share_of_step(one, _exposed(one))
    ),
    Measure(
        "skew",
        "seconds",
        "the part of exposed that lies before the last rank has started",
        lambda report: max(skew_by_rank(report).values()),
    ),
    Measure(
        "wire_bytes",
        "bytes",
        "bytes that a rank sends a step",
        _per_step(lambda rank: sum(one.wire_bytes for one in rank.operations)),
    ),
    Measure("collectives", "count", "collectives a step", _per_step(lambda rank: len(rank.operations))),
    Measure(
        "prefetch_misses",
        "count",
        "gathers a step that were not prefetched",
        _per_step(lambda rank: sum(module.prefetch_misses for module in rank.modules)),
    ),
    Measure("imbalance", "share", "by how much the largest rank's shards exceed the average", _imbalance),
    Measure(
        "profiler_overhead",
        "share",
        "the time that recording took, as a share of the recorded time",
        _most(lambda rank: rank.overhead.share),
    ),
)


_LIMIT = re.compile(r"\s*(\w+)\s*(>=|>)\s*(\+?)\s*(.+)")


@dataclass(frozen=True)
class Limit:
    """One limit: `kind` is the meaning of `amount`: "relative" (a share), "more" or "absolute" (the measure's unit)."""

    text: str
    measure: Measure
    inclusive: bool
    kind: Literal["relative", "more", "absolute"]
    amount: float

    @property
    def needs_base(self) -> bool:
        return self.kind != "absolute"

    def violation(self, report: Report, base: Report | None) -> str | None:
        """The reason why `report` breaks the limit, None if it does not. `base` is the run to compare with."""
        value = self.measure.of(report)
        bound = self.amount
        if self.needs_base:
            assert base is not None
            before = self.measure.of(base)
            bound = before * (1 + self.amount) if self.kind == "relative" else before + self.amount
        if not (value >= bound if self.inclusive else value > bound):
            return None
        unit = self.measure.unit
        return f"{self.measure.name} is {show(value, unit)}, the limit '{self.text}' allows {show(bound, unit)}"


def parse_limit(text: str) -> Limit:
    """The limit that `text` describes.

    Raises:
        InputError: with the part that cannot be read and the accepted forms.
    """
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise InputError(f"'{text}' is not a limit: expected MEASURE>LIMIT, such as peak_memory>+5% or step_time>=1.5s")
    name, operator, plus, amount = match.groups()
    measure = next((one for one in MEASURES if one.name == name), None)
    if measure is None:
        raise InputError(
            f"'{text}': there is no measure '{name}'; expected one of {', '.join(m.name for m in MEASURES)}"
        )
    try:
        if plus and amount.strip().endswith("%"):
            return Limit(text, measure, operator == ">=", "relative", parse_quantity(amount, "share"))
        return Limit(
            text, measure, operator == ">=", "more" if plus else "absolute", parse_quantity(amount, measure.unit)
        )
    except InputError as error:
        raise InputError(f"'{text}': {error}") from error
