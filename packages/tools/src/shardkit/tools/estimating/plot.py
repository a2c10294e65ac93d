"""Estimates as one HTML page of drawings, in the style of reports: memory and streams over time, and comparisons.

Drawings are SVG without scripts; pointing at a part shows its name. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from shardkit.tools.estimating.result import Estimate
from shardkit.tools.estimating.trace import CATEGORIES
from shardkit.tools.quantities import show

_WIDTH, _HEIGHT = 1000, 260
_COLORS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#b07aa1", "#9c755f", "#bab0ac")
# The colours of spans: there are more modules than colours.
_PHASES = ("forward", "backward", "optimizer", "between")
# A drawing cannot show more.
_MOST_POINTS = 1200


def plot_page(title: str, ways: Sequence[tuple[str, Estimate, float]], of: str = "a step") -> str:
    """The page.

    Args:
        title: the subject of the estimate.
        ways: a name, the estimate and the seconds for each way that is compared; the first is shown in detail.
        of: the unit of these seconds: a step, or a sample.
    """
    name, best, _ = ways[0]
    peak, line = best.peak, best.timeline
    parts = [f"<h1>{escape(title)}</h1>"]
    if len(ways) > 1:
        parts += _section(
            "Memory and time of each way", "Less of both is better: the front is filled.", _ways(ways, of)
        )
    told = f"Peak of {show(peak.bytes, 'bytes')} {peak.place}; limit {show(best.machine.memory, 'bytes')}."
    parts += [*_section(f"Memory over time: {name}", told, _memory(best)), _legend(CATEGORIES)]
    told = f"A step of {show(line.step, 'seconds')}, {show(line.exposed, 'seconds')} of it waiting."
    parts += [*_section(f"Streams: {name}", told, _streams(best)), _legend(_PHASES)]
    parts += [f"<p>{escape(note)}</p>" for note in best.notes]
    css = files("shardkit.tools.report").joinpath("assets", "page.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{css} svg {{ width: 100%; min-width: 40rem; height: auto; }} "
        "text { fill: var(--soft); font-size: 12px; }</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _section(title: str, told: str, drawing: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", f"<p>{escape(told)}</p>", drawing]


def _legend(names: Iterable[str]) -> str:
    told = (
        f'<span><span style="color:{color}">&#9632;</span> {name.replace("_", " ")}</span>'
        for color, name in zip(_COLORS, names, strict=False)
    )
    return f'<p class="filters">{" ".join(told)}</p>'


def _svg(height: int, body: str) -> str:
    return f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {height}" role="img">{body}</svg></div>'


def _shape(kind: str, told: str, **attributes: object) -> str:
    given = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f"<{kind} {given}><title>{escape(told)}</title></{kind}>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _memory(estimate: Estimate) -> str:
    """Stacked bytes of tensors by category over the time of the step; nearby levels are merged into the highest."""
    moments, levels, whole = estimate.timeline.moments, estimate.memory.levels, estimate.timeline.step or 1.0
    stride = -(-len(levels) // _MOST_POINTS) or 1
    shown = [max(levels[at : at + stride], key=lambda one: sum(one[1])) for at in range(0, len(levels), stride)]
    times = [moments[min(index, len(moments)) - 1] if index else 0.0 for index, _ in shown]
    most = estimate.peak.bytes or 1
    below, body = [0] * len(shown), []
    for number, category in enumerate(CATEGORIES):
        above = [low + sizes[number] for low, (_, sizes) in zip(below, shown, strict=True)]
        # Each level holds until the next one begins.
        corners = [
            [
                (at, level)
                for begin, end, level in zip(times, [*times[1:], whole], levels, strict=True)
                for at in (begin, end)
            ]
            for levels in (above, below)
        ]
        outline = " ".join(
            f"{at / whole * _WIDTH:.1f},{_HEIGHT - level / most * (_HEIGHT - 20):.1f}"
            for at, level in (*corners[0], *reversed(corners[1]))
        )
        body.append(_shape("polygon", category.replace("_", " "), points=outline, fill=_COLORS[number]))
        below = above
    body.append(_text(4, 14, show(most, "bytes")))
    return _svg(_HEIGHT + 16, "".join(body) + _time_axis(whole, _HEIGHT + 14))


def _time_axis(whole: float, y: float) -> str:
    return "".join(
        _text(part / 4 * _WIDTH, y, show(part / 4 * whole, "seconds"), anchor)
        for part, anchor in enumerate(("start", "middle", "middle", "middle", "end"))
    )


def _streams(estimate: Estimate) -> str:
    spans, whole = estimate.timeline.spans, estimate.timeline.step or 1.0
    lanes = list(dict.fromkeys(one.lane for one in spans))
    body = [_text(4, 40 * row + 12, lane) for row, lane in enumerate(lanes)]
    for one in spans:
        left, width = one.begin / whole * _WIDTH, (one.end - one.begin) / whole * _WIDTH
        if width >= 0.05:
            told = f"{one.fqn or 'outside of modules'}, {one.phase}: {show(one.end - one.begin, 'seconds')}"
            place = {"x": f"{left:.2f}", "y": 40 * lanes.index(one.lane) + 16, "width": f"{width:.2f}", "height": 20}
            body.append(_shape("rect", told, fill=_COLORS[_PHASES.index(one.phase)], **place))
    return _svg(40 * len(lanes) + 16, "".join(body) + _time_axis(whole, 40 * len(lanes) + 14))


def _ways(ways: Sequence[tuple[str, Estimate, float]], of: str) -> str:
    """A numbered point for each way, with memory to the right and seconds upwards, and a table of the numbers."""
    memory, times = [found.reserved_bytes for _, found, _ in ways], [seconds for _, _, seconds in ways]
    body = [
        _text(_WIDTH - 4, _HEIGHT - 4, f"reserved, {show(min(memory), 'bytes')} to {show(max(memory), 'bytes')}", "end")
    ]
    body.append(_text(4, 14, f"{of}, {show(min(times), 'seconds')} to {show(max(times), 'seconds')}"))
    rows = []
    for number, (name, size, seconds) in enumerate(zip((name for name, _, _ in ways), memory, times, strict=True), 1):
        better = any(
            (other <= size and time < seconds) or (other < size and time <= seconds)
            for other, time in zip(memory, times, strict=True)
        )
        right = 20 + _part_of(size, memory) * (_WIDTH - 60)
        down = _HEIGHT - 30 - _part_of(seconds, times) * (_HEIGHT - 60)
        cells = name, show(size, "bytes"), show(seconds, "seconds")
        fill = "none" if better else _COLORS[0]
        place = {"cx": f"{right:.1f}", "cy": f"{down:.1f}", "r": 6, "stroke": _COLORS[0], "fill": fill}
        body.append(_shape("circle", f"{cells[0]}: {cells[1]}, {cells[2]} {of}", **place))
        body.append(_text(right + 9, down + 4, str(number)))
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in (f"{number}. {cells[0]}", *cells[1:])))
    head = f"<tr><th>way</th><th>reserved</th><th>{of}</th></tr>"
    table = f'<div class="scroll"><table>{head}{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'
    return _svg(_HEIGHT, "".join(body)) + table


def _part_of(value: float, values: Sequence[float]) -> float:
    """The relative position of a value between the smallest (0) and the largest (1)."""
    return (value - min(values)) / ((max(values) - min(values)) or 1)
