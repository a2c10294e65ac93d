"""The picture of the README: step time, bytes of tensors and host time against FSDP2, drawn as SVG from saved results.

`python website/benchmark_chart.py` writes it anew; a test fails while it does not show `benchmarks/results`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHART = ROOT / "docs" / "images" / "benchmarks.svg"

# Narrow, so that a phone shows the text at a readable size.
_WIDTH, _LABEL, _BAR = 480, 182, 220
_ROW, _HEAD = 21, 44
_STYLE = """<style>
text { font-size: 14px; fill: #222 } .title { font-weight: bold } .small { font-size: 12px; fill: #555 }
.page { fill: #fff } .bar { fill: #3f6fd8 } .stock { stroke: #666 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e6e6 } .small { fill: #aaa } .page { fill: #1e2129 } .bar { fill: #7aa2f7 } .stock { stroke: #aaa }
}
</style>"""


@dataclass(frozen=True)
class Panel:
    """One measure in one setting: for each configuration the ratio to FSDP2, below 1 where shardkit needs less."""

    title: str
    setting: str
    bars: tuple[tuple[str, float], ...]


def read(results: Path = RESULTS) -> list[Panel]:
    """The panels, from the saved results."""
    runs = [json.loads(path.read_text()) for path in sorted((results / "compare").glob("*.json"))]
    near = tuple((_name(run["settings"]), _step(run)) for run in runs if run["settings"].get("link") is None)
    (far,) = json.loads((results / "link.json").read_text())["runs"]
    tensors = json.loads((results / "tensors.json").read_text())
    held = tuple((_name(run), run["peaks"]["shardkit"] / run["peaks"]["fsdp2"]) for run in tensors["runs"])
    scale = json.loads((results / "scale.json").read_text())
    host = tuple(
        (f"{run['ranks']:,} ranks", run["costs"]["shardkit"]["later"] / run["costs"]["stock"]["later"])
        for run in scale["runs"]
    )
    return [
        Panel("Step time", "CPU ranks of one host, which share memory", near),
        Panel("Step time over 1 Gbit/s", f"{_name(far)}, in two network namespaces", tuple(far["ratio"].items())),
        Panel("Bytes of tensors at the peak", "CPU ranks of one host", held),
        Panel("Host time of a step", "one CPU process, whose other ranks are simulated", host),
    ]


def _name(settings: dict[str, Any]) -> str:
    ranks = settings["world_size"]
    return f"{settings['workload']}, {ranks} rank{'s' if ranks > 1 else ''}"


def _step(run: dict[str, Any]) -> float:
    ratio: float = next(row for row in run["rows"] if row["key"] == "step")["ratios"]["fsdp2"]["median"]
    return ratio


def draw(panels: list[Panel]) -> str:
    """The SVG: a bar for each configuration of each panel, and a line where FSDP2 stands."""
    height = 40 + sum(_HEAD + _ROW * len(panel.bars) + 14 for panel in panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"',
        'font-family="sans-serif">',
        _STYLE,
        "<title>shardkit over FSDP2: step time, bytes of tensors, host time</title>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        '<text x="10" y="24" class="title">shardkit / FSDP2 (line: FSDP2; less is better)</text>',
    ]
    top = 40
    for panel in panels:
        lines += _panel(panel, top)
        top += _HEAD + _ROW * len(panel.bars) + 14
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(panel: Panel, top: int) -> list[str]:
    lines = [
        f'<text x="10" y="{top + 16}" class="title">{panel.title}</text>',
        f'<text x="10" y="{top + 34}" class="small">{panel.setting}</text>',
    ]
    for row, (label, ratio) in enumerate(panel.bars):
        y, length = top + _HEAD + row * _ROW, round(ratio * _BAR)
        number = _LABEL + 6 + (length if ratio < 0.8 else max(length, _BAR))  # not on the line
        lines += [
            f'<text x="{_LABEL - 8}" y="{y + 13}" text-anchor="end">{label}</text>',
            f'<rect class="bar" x="{_LABEL}" y="{y}" width="{length}" height="16"/>',
            f'<text x="{number}" y="{y + 13}">{ratio:.2f}</text>',
        ]
    end, low = _LABEL + _BAR, top + _HEAD + _ROW * len(panel.bars)
    return [*lines, f'<line class="stock" x1="{end}" y1="{top + _HEAD - 4}" x2="{end}" y2="{low}" stroke-width="2"/>']


if __name__ == "__main__":
    CHART.write_text(draw(read()))
