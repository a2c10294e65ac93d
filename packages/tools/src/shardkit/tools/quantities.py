"""Quantities as people read and write them: `1.5 GiB`, `12.3 ms`, `4.2 %`."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["bytes", "seconds", "count", "share"]

UNITS: dict[Unit, dict[str, float]] = {
    "bytes": {
        "B": 1,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
        "kB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "TB": 1e12,
    },
    "seconds": {"s": 1, "ms": 1e-3, "us": 1e-6},
    "count": {"": 1},
    "share": {"%": 0.01, "": 1},
}
"""What may stand behind a number, by unit."""

_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z%]*)")


def show(value: float, unit: Unit) -> str:
    """`value`, in bytes, seconds, as a count or a share, for people."""
    if unit == "bytes":
        return _bytes(value)
    if unit == "seconds":
        return _seconds(value)
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def show_bandwidth(value: float | None) -> str:
    """Bytes per second for people; a dash where nothing was measured."""
    return "-" if value is None else f"{value / 1e9:.2f} GB/s"


def parse_quantity(text: str, unit: Unit) -> float:
    """The number that `text` stands for, in bytes, seconds, as a count or a share.

    Raises:
        ValueError: with what was found and what may stand there.
    """
    match = _QUANTITY.fullmatch(text.strip())
    known = UNITS[unit]
    if match is None or match.group(2) not in known:
        words = ", ".join(name or "nothing" for name in known)
        raise ValueError(f"'{text.strip()}' is no number of {unit}: expected digits and one of {words}")
    return float(match.group(1)) * known[match.group(2)]


def _bytes(value: float) -> str:
    for name in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {name}" if name == "B" else f"{value:.1f} {name}"
        value /= 1024
    return f"{value:.2f} TiB"


def _seconds(value: float) -> str:
    if abs(value) >= 1:
        return f"{value:.2f} s"
    if abs(value) >= 1e-3 or value == 0:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.0f} us"
