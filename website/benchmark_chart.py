"""The chart of the README: step time and memory against FSDP2, drawn as SVG from the saved comparisons.

`python website/benchmark_chart.py` writes it anew; a test fails while it does not show the saved results.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "compare"
CHART = ROOT / "docs" / "images" / "benchmarks.svg"

_LABEL, _BAR, _ROW, _TOP, _BOTTOM = 210, 420, 46, 64, 44
_SERIES = (("step", "step time", "#3f6fd8"), ("held", "memory, shared pages by shares", "#d9822b"))


@dataclass(frozen=True)
class Bars:
    """One configuration: for each series the ratio to FSDP2, below 1 where shardkit needs less."""

    label: str
    ratios: tuple[float, ...]


def read(results: Path = RESULTS) -> tuple[list[Bars], str]:
    """The configurations that were run beside FSDP2, by name, and the machine of the runs."""
    runs = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    bars = []
    for run in runs:
        rows = {row["key"]: row["ratios"] for row in run["rows"]}
        ratios = tuple(rows[key]["fsdp2"]["median"] for key, _, _ in _SERIES)
        ranks = run["settings"]["world_size"]
        bars.append(Bars(f"{run['settings']['workload']}, {ranks} rank{'s' if ranks > 1 else ''}", ratios))
    facts = runs[0]["surroundings"]
    return bars, f"{facts['cpu']}, {facts['cores']} cores, gloo, torch {facts['torch']}, {facts['date'].split()[0]}"


def draw(bars: list[Bars], taken_on: str) -> str:
    """The SVG: a group of bars for each configuration, and a line where FSDP2 stands."""
    width, height = _LABEL + _BAR + 70, _TOP + _ROW * len(bars) + _BOTTOM
    end = _LABEL + _BAR
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        f'width="{width}" height="{height}" font-family="sans-serif">',
        "<style>text { font-size: 13px } .title { font-size: 15px; font-weight: bold }</style>",
        "<title>Step time and memory of shardkit over those of FSDP2</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="22" class="title" fill="#222">shardkit / FSDP2 (less is better)</text>',
    ]
    for at, (_, name, colour) in enumerate(_SERIES):
        x = 12 + at * 110
        lines += [
            f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/>',
            f'<text x="{x + 18}" y="45" fill="#222">{name}</text>',
        ]
    for row, one in enumerate(bars):
        y = _TOP + row * _ROW
        lines.append(f'<text x="{_LABEL - 10}" y="{y + 25}" text-anchor="end" fill="#222">{one.label}</text>')
        for at, ((_, _, colour), ratio) in enumerate(zip(_SERIES, one.ratios, strict=True)):
            top, length = y + 4 + at * 17, round(ratio * _BAR)
            lines += [
                f'<rect x="{_LABEL}" y="{top}" width="{length}" height="15" fill="{colour}"/>',
                f'<text x="{_LABEL + length + 6}" y="{top + 12}" fill="#222">{ratio:.2f}</text>',
            ]
    below = _TOP + _ROW * len(bars)
    lines += [
        f'<line x1="{end}" y1="{_TOP - 8}" x2="{end}" y2="{below}" stroke="#666" stroke-dasharray="4 3"/>',
        f'<text x="{end}" y="{_TOP - 12}" text-anchor="middle" fill="#444">FSDP2 = 1</text>',
        f'<text x="12" y="{below + 26}" style="font-size: 11px" fill="#555">{taken_on}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    CHART.write_text(draw(*read()))
