"""`python -m tests.simulation races|captures|timeline`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.simulation.capture import MORE, NOT_CAPTURED, check_capture
from tests.simulation.configurations import CONFIGURATIONS, Configuration, check
from tests.simulation.scenarios import COMPARISONS, Measured, measure
from tests.simulation.training import ENGINES


def _first_and_later(measured: Measured) -> str:
    def step(index: int) -> str:
        return f"{measured.forward[index]:.5g}+{measured.backward[index]:.5g}"

    return f"{step(0):>15} {step(-1):>15}"


def _timeline(pattern: str, path: Path | None) -> None:
    print(
        f"{'scenario':<50} {'stock: first':>15} {'later':>15} {'ours: first':>15} {'later':>15}  peak KiB: stock   ours"
    )
    rows = []
    for comparison in COMPARISONS:
        if pattern not in comparison.name:
            continue
        measured = {engine: measure(comparison, engine) for engine in ENGINES}
        rows.append({"scenario": comparison.name, **{engine: asdict(one) for engine, one in measured.items()}})
        peaks = "".join(f"{one.peak_bytes / 1024:10.1f}" for one in measured.values())
        times = " ".join(_first_and_later(one) for one in measured.values())
        print(f"{comparison.name:<50} {times}  {peaks}", flush=True)
    if path is not None:
        path.write_text(json.dumps(rows, indent=2) + "\n")


def _races(configuration: Configuration, engine: str) -> list[str]:
    return list(check(configuration, engine).findings)


def _check_all(checks: Callable[[Configuration, str], list[str]], given: list[Configuration], engine: str) -> int:
    total = 0
    for configuration in given:
        if engine == "stock" and not configuration.on_stock:
            continue
        findings = checks(configuration, engine)
        total += len(findings)
        print(f"{configuration.name:<50} {len(findings) or 'no'} findings", flush=True)
        for finding in findings:
            print("  " + finding.replace("\n", "\n  "))
    return min(total, 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    tools = parser.add_subparsers(dest="tool", required=True)
    timeline = tools.add_parser("timeline", help="stock's and our times and memory, one row a scenario")
    timeline.add_argument("--json", type=Path, metavar="FILE", help="write every step's figures, too")
    races = tools.add_parser("races", help="races, and memory that is used while it is another's")
    captures = tools.add_parser("captures", help="operations that break the capture of a step as a CUDA graph")
    for tool in (races, captures):
        tool.add_argument("--engine", choices=list(ENGINES), default="ours")
    for tool in (timeline, races, captures):
        tool.add_argument("--only", default="", metavar="TEXT", help="only those whose name contains it")
    given = parser.parse_args()
    if given.tool == "races":
        return _check_all(_races, [one for one in CONFIGURATIONS if given.only in one.name], given.engine)
    if given.tool == "captures":
        chosen = [one for one in (*MORE, *CONFIGURATIONS) if given.only in one.name and one.name not in NOT_CAPTURED]
        return _check_all(check_capture, chosen, given.engine)
    _timeline(given.only, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
