"""shardkit doctor: says in plain words what a run loses time and memory by, and what to change."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from shardkit.tools.doctor.diagnosis import diagnose
from shardkit.tools.report.files import read_report, write_text

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 for a report that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="shardkit doctor", description="Reads a report of `shardkit profile` and says what to change."
    )
    parser.add_argument("report", type=Path, help="the report, as JSON")
    parser.add_argument("--json", type=Path, help="also write the findings as JSON")
    options = parser.parse_args(arguments)
    try:
        findings = diagnose(read_report(options.report))
        if options.json is not None:
            write_text(options.json, json.dumps([asdict(one) for one in findings], indent=2) + "\n")
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    console = Console()
    if not findings:
        console.print("nothing found that is worth a change")
    for number, finding in enumerate(findings, 1):
        console.print(f"{number}. {finding.seen}", markup=False, highlight=False)
        console.print(f"   costs {finding.price}", markup=False, style="yellow")
        console.print(f"   change: {finding.change}", markup=False, highlight=False)
    return 0
