"""`python -m tests.simulation races|timeline`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.simulation.scenarios import ENGINES, SCENARIOS, Measured, measure


def _first_and_later(measured: Measured) -> str:
    def step(index: int) -> str:
        return f"{measured.forward[index]:.5g}+{measured.backward[index]:.5g}"

    return f"{step(0):>15} {step(-1):>15}"


def _timeline(pattern: str, path: Path | None) -> None:
    print(
        f"{'scenario':<50} {'stock: first':>15} {'later':>15} {'ours: first':>15} {'later':>15}   peak KiB: stock  ours"
    )
    rows = []
    for scenario in SCENARIOS:
        if pattern not in scenario.name:
            continue
        measured = {engine: measure(scenario, engine) for engine in ENGINES}
        rows.append({"scenario": scenario.name, **{engine: asdict(one) for engine, one in measured.items()}})
        peaks = "".join(f"{one.peak_unsharded_bytes / 1024:8.1f}" for one in measured.values())
        times = " ".join(_first_and_later(one) for one in measured.values())
        print(f"{scenario.name:<50} {times}   {peaks:>16}", flush=True)
    if path is not None:
        path.write_text(json.dumps(rows, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    tools = parser.add_subparsers(dest="tool", required=True)
    timeline = tools.add_parser("timeline", help="stock's and our times and memory, one row a scenario")
    timeline.add_argument("--json", type=Path, metavar="FILE", help="write every step's figures, too")
    timeline.add_argument("--only", default="", metavar="TEXT", help="only scenarios whose name contains it")
    given = parser.parse_args()
    if given.tool == "timeline":
        _timeline(given.only, given.json)


if __name__ == "__main__":
    sys.exit(main())
