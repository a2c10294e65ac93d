"""Estimates as one HTML page of drawings, in the style of reports: memory and streams over time, and ways compared.

Drawings are SVG without scripts; a pointer over a part shows what it is. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from shardkit.tools.estimating.result import Estimate
from shardkit.tools.estimating.trace import CATEGORIES
from shardkit.tools.quantities import show

__all__ = ["plot_page"]

_WIDTH, _HEIGHT = 1000, 260
_COLORS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#b07aa1", "#9c755f", "#bab0ac")
# A drawing cannot show more.
_MOST_POINTS = 1200


def plot_page(title: str, ways: Sequence[tuple[str, Estimate, float]]) -> str:
    """The page.

    Args:
        title: what was estimated.
        ways: a name, the estimate and the seconds of a sample for each way that is compared; the first is shown in
            detail.
    """
    name, best, _ = ways[0]
    peak, line = best.peak, best.timeline
    parts = [f"<h1>{escape(title)}</h1>"]
    if len(ways) > 1:
        parts += _section("Memory and time of each way", "Less of both is better: the front is filled.", _ways(ways))
    told = f"Peak of {show(peak.bytes, 'bytes')} {peak.place}; limit {show(best.machine.memory, 'bytes')}."
    names = (
        f'<span><span style="color:{color}">&#9632;</span> {category.replace("_", " ")}</span>'
        for color, category in zip(_COLORS, CATEGORIES, strict=True)
    )
    legend = f'<p class="filters">{" ".join(names)}</p>'
    parts += [*_section(f"Memory over time: {name}", told, _memory(best)), legend]
    told = f"A step of {show(line.step, 'seconds')}, {show(line.exposed, 'seconds')} of it waiting."
    parts += _section(f"Streams: {name}", told, _streams(best))
    parts += [f"<p>{escape(note)}</p>" for note in best.notes]
    css = files("shardkit.tools.report").joinpath("assets", "page.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{css} svg {{ width: 100%; height: auto; }} "
        "text { fill: var(--soft); font-size: 12px; }</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _section(title: str, told: str, drawing: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", f"<p>{escape(told)}</p>", drawing]


def _svg(height: int, body: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{body}</svg>'


def _shape(kind: str, told: str, **attributes: object) -> str:
    given = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f"<{kind} {given}><title>{escape(told)}</title></{kind}>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _memory(estimate: Estimate) -> str:
    """Bytes of tensors by category, stacked, over the time of the step."""
    moments, levels = estimate.timeline.moments, estimate.memory.levels
    stride = -(-len(levels) // _MOST_POINTS) or 1
    points = [(moments[min(index, len(moments)) - 1] if index else 0.0, sizes) for index, sizes in levels[::stride]]
    most = max((sum(sizes) for _, sizes in points), default=0) or 1
    span = estimate.timeline.step or 1.0
    below, body = [0] * len(points), []
    for number, category in enumerate(CATEGORIES):
        above = [low + sizes[number] for low, (_, sizes) in zip(below, points, strict=True)]
        outline = [*zip(points, above, strict=True), *reversed(list(zip(points, below, strict=True)))]
        corners = " ".join(
            f"{time / span * _WIDTH:.1f},{_HEIGHT - level / most * (_HEIGHT - 20):.1f}" for (time, _), level in outline
        )
        body.append(_shape("polygon", category.replace("_", " "), points=corners, fill=_COLORS[number]))
        below = above
    body.append(_text(4, 14, show(most, "bytes")))
    return _svg(_HEIGHT, "".join(body))


def _streams(estimate: Estimate) -> str:
    """What runs on each stream over the time of the step."""
    spans, whole = estimate.timeline.spans, estimate.timeline.step or 1.0
    lanes = list(dict.fromkeys(one.lane for one in spans))
    names = {name: index for index, name in enumerate(dict.fromkeys(one.fqn for one in spans))}
    body = [_text(4, 40 * row + 12, lane) for row, lane in enumerate(lanes)]
    for one in spans:
        left, width = one.begin / whole * _WIDTH, (one.end - one.begin) / whole * _WIDTH
        if width >= 0.05:
            told = f"{one.fqn or 'outside of modules'}, {one.phase}: {show(one.end - one.begin, 'seconds')}"
            place = {"x": f"{left:.2f}", "y": 40 * lanes.index(one.lane) + 16, "width": f"{width:.2f}", "height": 20}
            body.append(_shape("rect", told, fill=_COLORS[names[one.fqn] % len(_COLORS)], **place))
    return _svg(40 * len(lanes) + 4, "".join(body))


def _ways(ways: Sequence[tuple[str, Estimate, float]]) -> str:
    """A point for each way: memory to the right, seconds of a sample upwards."""
    memory = max(found.reserved_bytes for _, found, _ in ways)
    slowest = max(seconds for _, _, seconds in ways)
    body = [_text(_WIDTH - 4, _HEIGHT - 4, f"reserved, up to {show(memory, 'bytes')}", "end")]
    body.append(_text(4, 14, f"a sample, up to {show(slowest, 'seconds')}"))
    for name, found, seconds in ways:
        better = any(
            (other.reserved_bytes <= found.reserved_bytes and time < seconds)
            or (other.reserved_bytes < found.reserved_bytes and time <= seconds)
            for _, other, time in ways
        )  # fmt: skip
        place = {
            "cx": f"{20 + found.reserved_bytes / memory * (_WIDTH - 60):.1f}",
            "cy": f"{_HEIGHT - 30 - seconds / slowest * (_HEIGHT - 60):.1f}",
        }
        told = f"{name}: {show(found.reserved_bytes, 'bytes')}, {show(seconds, 'seconds')} a sample"
        body.append(_shape("circle", told, r=6, stroke=_COLORS[0], fill="none" if better else _COLORS[0], **place))
    return _svg(_HEIGHT, "".join(body))
