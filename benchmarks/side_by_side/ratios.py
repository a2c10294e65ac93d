"""From samples to rows, with ratios of the first system to each other one, and from rows to text for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from turns import Ratio, ratio, table

from side_by_side.rank import Times
from side_by_side.run import Measured


@dataclass(frozen=True)
class Row:
    """One line of the table: the figures of each system, and how the first one compares."""

    key: str
    label: str
    unit: str
    absolute: dict[str, float]
    ratios: dict[str, Ratio]


_TIMED = {
    "step": ("step time", "step"),
    "cpu": ("CPU of a rank, whole step", "cpu"),
    "forward": ("  forward", "forward_cpu"),
    "backward": ("  backward", "backward_cpu"),
    "optimizer": ("  optimizer", "optimizer_cpu"),
}
_COUNTED = {
    "held": "peak memory, shared pages by shares",
    "wire": "bytes a rank sends",
    "calls": "c10d calls of a rank",
}


def rows_of(measured: dict[str, Measured], device: str) -> list[Row]:
    """All rows that the measured systems allow; ratios are the first system's against the others'."""
    rows = []
    for key, (label, field) in _TIMED.items():
        samples = {name: [getattr(times, field) * 1e3 for times in one.rounds] for name, one in measured.items()}
        rows.append(_row(key, label, "ms", samples))
    if "alone" in measured and len(measured) > 1:
        rows.append(_hooks(measured, device))
    counts = {name: _counts(one) for name, one in measured.items()}
    for key in next(iter(counts.values())):
        label = _COUNTED.get(key, f"{key.replace('_', ' ')} memory")
        rows.append(
            _row(key, label, "" if key == "calls" else "MiB", {name: [one[key]] for name, one in counts.items()})
        )
    return rows


def _counts(one: Measured) -> dict[str, float]:
    """MiB, and calls."""
    nbytes = {f"peak_{kind}": most for kind, most in one.peaks.items()}
    nbytes |= {key: one.traffic[key] for key in ("held", "wire") if key in one.traffic}
    return {key: count / 2**20 for key, count in nbytes.items()} | {"calls": sum(one.traffic["calls"].values())}


def _hooks(measured: dict[str, Measured], device: str) -> Row:
    """Forward and backward beyond `alone`'s of the same round: CPU seconds, or host time where a GPU computes."""

    def busy(times: Times) -> float:
        return times.forward_cpu + times.backward_cpu if device == "cpu" else times.host

    limit = [busy(times) for times in measured["alone"].rounds]
    samples = {
        name: [(busy(times) - least) * 1e3 for times, least in zip(one.rounds, limit, strict=True)]
        for name, one in measured.items()
        if name != "alone"
    }
    return _row("hooks", "forward + backward beyond alone", "ms", samples)


def _row(key: str, label: str, unit: str, samples: dict[str, list[float]]) -> Row:
    absolute = {name: median(values) for name, values in samples.items()}
    (_, first), *others = samples.items()
    ratios = {name: ratio(first, values) for name, values in others if all(value > 0 for value in values)}
    return Row(key, label, unit, absolute, ratios)


def absolute_table(rows: Sequence[Row], systems: Sequence[str]) -> str:
    """Medians over the rounds, one column for each system."""
    lines = (
        [f"{row.label} {row.unit}".rstrip(), *(_number(row.absolute.get(name)) for name in systems)] for row in rows
    )
    return table(["median over the rounds", *systems], lines)


def ratio_table(rows: Sequence[Row], first: str, others: Sequence[str]) -> str:
    """Medians of the ratios of each round, with their extremes."""
    lines = ([row.label, *(row.ratios.get(name, "-") for name in others)] for row in rows if row.ratios)
    return table([f"{first} / ...", *others], lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
