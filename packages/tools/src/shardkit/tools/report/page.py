"""A report as one HTML page that needs nothing else: charts, filters and data are inside.

The charts are drawn by uPlot (MIT licence, in `assets/`). All data is embedded as JSON in which no character can end
the element that holds it, and the page puts it in place as text.
"""

from __future__ import annotations

import json
from importlib.resources import files

from shardkit.tools.report.schema import Report
from shardkit.tools.report.view import view_of

__all__ = ["page_html"]

_DANGEROUS = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page_html(report: Report) -> str:
    """The page's text."""
    parts = {
        "chart-css": _asset("uPlot.min.css"),
        "page-css": _asset("page.css"),
        "chart-js": f"/*\n{_asset('uPlot.LICENSE')}*/\n{_asset('uPlot.iife.min.js')}",
        "page-js": _asset("page.js"),
        "data": embedded(json.dumps(view_of(report), allow_nan=False, separators=(",", ":"))),
    }
    before, *rest = _asset("page.html").split("/*{")
    pieces = [before]
    for piece in rest:
        name, after = piece.split("}*/", 1)
        pieces += [parts[name], after]
    return "".join(pieces)


def embedded(text: str) -> str:
    """JSON text that may stand inside a `script` element."""
    for character, escape in _DANGEROUS.items():
        text = text.replace(character, escape)
    return text


def _asset(name: str) -> str:
    return files("shardkit.tools.report").joinpath("assets", name).read_text(encoding="utf-8")
