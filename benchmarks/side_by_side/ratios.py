"""From samples to rows, with ratios of the first system to each other one, and from rows to text for people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from side_by_side.rank import Times
from side_by_side.run import Measured

Value = Callable[[Times], float]


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of each round, with their extremes. A count has one ratio only."""

    median: float
    least: float
    most: float
    rounds: int


@dataclass(frozen=True)
class Row:
    """One line of the table: the figures of each system, and how the first one compares."""

    key: str
    label: str
    unit: str
    absolute: dict[str, float]
    ratios: dict[str, Ratio]


_TIMED: dict[str, tuple[str, Value]] = {
    "step": ("step time", lambda times: times.step),
    "cpu": ("CPU of a rank, whole step", lambda times: times.cpu),
    "forward": ("  forward", lambda times: times.forward_cpu),
    "backward": ("  backward", lambda times: times.backward_cpu),
    "optimizer": ("  optimizer", lambda times: times.optimizer_cpu),
}


def rows_of(measured: dict[str, Measured], device: str) -> list[Row]:
    """All rows that the measured systems allow; ratios are the first system's against the others'."""
    rows = [_timed(key, label, value, measured) for key, (label, value) in _TIMED.items()]
    if "alone" in measured and len(measured) > 1:
        rows.append(_hooks(measured, device))
    for kind in next(iter(measured.values())).peaks:
        rows.append(_single(f"peak_{kind}", f"peak {kind} memory", _MIB, measured, lambda one, k=kind: one.peaks[k]))
    if all("held" in one.traffic for one in measured.values()):
        label = "peak memory, shared pages by shares"
        rows.append(_single("held", label, _MIB, measured, lambda one: one.traffic["held"]))
    if all("socket_bytes" in one.traffic for one in measured.values()):
        rows.append(_single("wire", "bytes a rank sends", _MIB, measured, lambda one: one.traffic["socket_bytes"]))
    rows.append(
        _single("calls", "c10d calls of a rank", _COUNT, measured, lambda one: sum(one.traffic["calls"].values()))
    )
    return rows


_MIB = ("MiB", 2.0**-20)
_COUNT = ("", 1.0)


def _timed(key: str, label: str, value: Value, measured: dict[str, Measured]) -> Row:
    samples = {name: [value(times) * 1e3 for times in one.rounds] for name, one in measured.items()}
    return _row(key, label, "ms", samples)


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


def _single(
    key: str, label: str, unit: tuple[str, float], measured: dict[str, Measured], value: Callable[[Measured], float]
) -> Row:
    name, scale = unit
    return _row(key, label, name, {system: [value(one) * scale] for system, one in measured.items()})


def _row(key: str, label: str, unit: str, samples: dict[str, list[float]]) -> Row:
    absolute = {name: median(values) for name, values in samples.items()}
    (_, first), *others = samples.items()
    ratios = {name: _ratio(first, values) for name, values in others if all(value > 0 for value in values)}
    return Row(key, label, unit, absolute, ratios)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    each = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return Ratio(median(each), min(each), max(each), len(each))


def absolute_table(rows: Sequence[Row], systems: Sequence[str]) -> str:
    """Medians over the rounds, one column for each system."""
    lines = [["median over the rounds", *systems]]
    for row in rows:
        lines.append([f"{row.label} {row.unit}".rstrip(), *(_number(row.absolute.get(name)) for name in systems)])
    return _aligned(lines)


def ratio_table(rows: Sequence[Row], first: str, others: Sequence[str]) -> str:
    """Medians of the ratios of each round, with their extremes."""
    lines = [[f"{first} / ...", *others]]
    for row in rows:
        if row.ratios:
            lines.append([row.label, *(_spread(row.ratios.get(name)) for name in others)])
    return _aligned(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


def _spread(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    if ratio.rounds == 1:
        return f"{ratio.median:.2f}"
    return f"{ratio.median:.2f} [{ratio.least:.2f}-{ratio.most:.2f}]"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = []
    for line in lines:
        label, *cells = line
        text.append("  ".join([label.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]))
    text.insert(1, "-" * len(text[0]))
    return "\n".join(text)
