"""Rows as text for people."""

from collections.abc import Sequence

from side_by_side.ratios import Ratio, Row


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
