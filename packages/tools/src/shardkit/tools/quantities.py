"""Quantities as people read and write them: `1.5 GiB`, `12.3 ms`, `4.2 %`."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from shardkit.tools.files import InputError

Unit: TypeAlias = Literal["bytes", "seconds", "count", "share"]

_BINARY = {name: float(1024**power) for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)}
_COUNTS = {"thousand": 1e3, "million": 1e6, "billion": 1e9}
_DECIMAL = {name: float(1000**power) for power, name in enumerate(("kB", "MB", "GB", "TB"), 1)}
UNITS: dict[Unit, dict[str, float]] = {
    "bytes": {"B": 1, "": 1, **_BINARY, **_DECIMAL},
    "seconds": {"s": 1, "ms": 1e-3, "us": 1e-6},
    "count": {"": 1, **_COUNTS},
    "share": {"%": 0.01, "": 1},
}
"""Suffixes of numbers and their factors, by unit; case is ignored."""

_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z%]*)", re.ASCII)


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dtype_name(text: str) -> str:
    """`bf16`, `BF16` and `BFloat16` are `bfloat16`."""
    return _DTYPES.get(text.lower(), text.lower())


def show(value: float, unit: Unit) -> str:
    """`value`, in bytes, seconds, as a count or a share, as text for people."""
    if unit == "bytes":
        return _scaled(value, "B", _BINARY)
    if unit == "seconds":
        if abs(value) >= 1:
            return f"{value:.2f} s"
        return f"{value * 1e3:.1f} ms" if abs(value) >= 1e-3 or value == 0 else f"{value * 1e6:.0f} us"
    if unit == "share":
        return f"{value:.1%}"
    if abs(value) >= 1e4:
        return _scaled(value, "", _COUNTS)
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def _scaled(value: float, base: str, names: dict[str, float]) -> str:
    name = max((name for name in names if abs(value) >= names[name]), key=lambda one: names[one], default=None)
    if name is None:
        return f"{value:.0f} {base}"
    return f"{value / names[name]:.{2 if name in ('TiB', 'billion', 'million') else 1}f} {name}"


def parse_quantity(text: str, unit: Unit) -> float:
    """The number that `text` stands for, in bytes, seconds, as a count or a share.

    Raises:
        InputError: with the text found and the forms that are accepted.
    """
    match = _QUANTITY.fullmatch(text.strip())
    known = {name.lower(): factor for name, factor in UNITS[unit].items()}
    if match is None or match[2].lower() not in known:
        words = ", ".join(name or "nothing" for name in UNITS[unit])
        raise InputError(f"'{text.strip()}' is not a number of {unit}: expected digits and one of {words}")
    return float(match[1]) * known[match[2].lower()]
