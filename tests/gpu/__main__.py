"""`python3 -m tests.gpu`: see the package."""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu.plan import PARTS, jobs
from tests.gpu.schedule import ROOT, Check, Job, Row, Schedule, environment

_BEGAN = time.monotonic()
_FACTS_LIMIT = 120  # seconds: a first import of torch from a cold disk


def main() -> int:
    options = _options()
    on_cpu = os.environ.get("SHARDKIT_GPU_TESTS") == "cpu"
    facts = _facts(options.commit)
    if "error" in facts:
        print(f"python3 -m tests.gpu: torch cannot be imported: {facts['error']}")
        return 2
    if facts["gpu"] is None and not on_cpu:
        print(f"python3 -m tests.gpu: there is no GPU on this machine (torch {facts['torch']}); nothing was run")
        return 2
    results = Results(options.out, {**facts, "minutes": options.minutes, "on_cpu": on_cpu})
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="shardkit-gpu-") as work:
            schedule = Schedule(options.minutes, _BEGAN, options.out, Path(work), results.add)
            schedule.run(_broken([job for job in jobs(facts) if job.part in options.parts]))
    finally:
        results.finish()
    return int(any(row.bad for row in results.rows))


class Results:
    """All rows so far, in DIR/results.json after each."""

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "log.txt").write_text("")
        self.rows: list[Row] = []
        self._out, self._facts = out, facts
        self._save()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._save()
        print(f"{time.monotonic() - _BEGAN:4.0f} s  {row.part}, {row.job}: {_line(row)}", flush=True)

    def finish(self) -> None:
        lines = ["", *_table(self.rows), ""]
        (self._out / "table.txt").write_text("\n".join(lines))
        print("\n".join(lines), flush=True)

    def _save(self) -> None:
        path = self._out / "results.json"
        told = {"facts": self._facts, "rows": [asdict(row) for row in self.rows]}
        path.with_suffix(".new").write_text(json.dumps(told, indent=1) + "\n")
        path.with_suffix(".new").replace(path)


def _line(row: Row, width: int = 150) -> str:
    said = row.note or (row.figures or {}).get("text", "")
    return f"{row.check}: {row.state} {' '.join(said.split())[:width]}".rstrip()


def _table(rows: list[Row]) -> list[str]:
    """A line for each part, one for each figure, and one for each check that did not hold."""
    lines = []
    for part in PARTS:
        own = [row for row in rows if row.part == part]
        counts = {state: sum(row.state == state for row in own) for state in dict.fromkeys(row.state for row in own)}
        lines.append(f"{part:8} " + (", ".join(f"{count} {state}" for state, count in counts.items()) or "no checks"))
        shown = [row for row in own if row.state not in ("ok", "skipped") or "text" in (row.figures or {})]
        skipped = {row.note for row in own if row.state == "skipped"}
        lines += [f"    {row.job}, {_line(row, 110)}" for row in shown]
        lines += [f"    skipped: {note[:110]}" for note in sorted(skipped)]
    return lines


def _facts(commit: str | None) -> dict[str, Any]:
    """Facts of this machine, found by another process, so that this one never touches CUDA."""
    command = [sys.executable, "-m", "tests.gpu.rank", "--facts"]
    told: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": commit or _commit(), "cpu": platform.machine()}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=_FACTS_LIMIT, check=True
        )
    except subprocess.CalledProcessError as error:
        return {"error": (error.stderr.strip().splitlines() or [f"status {error.returncode}"])[-1]}
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {_FACTS_LIMIT} s"}
    return told | json.loads(done.stdout.splitlines()[-1])


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _broken(all_jobs: list[Job]) -> list[Job]:
    """The jobs; those of parts that a test names run functions of test_script.py instead."""
    broken: dict[str, list[str]] = json.loads(os.environ.get("SHARDKIT_GPU_TESTS_BREAK", "{}"))
    made = []
    for part, ways in broken.items():
        checks = tuple(Check(one, f"test_script:{one}", limit=1 if one == "hang" else 60) for one in ways)
        made.append(Job(part, "broken", checks, 90, "none"))
    return [*made, *(job for job in all_jobs if job.part not in broken)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu", description="Checks and figures on one GPU.")
    parser.add_argument("--minutes", type=float, default=8.0, help="how long all of it may take (8)")
    parser.add_argument("--out", type=Path, default=Path(".benchmarks/gpu"), metavar="DIR", help="for results and logs")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--commit", help="the commit, where git cannot tell")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    options.out = options.out.absolute()
    return options


if __name__ == "__main__":
    sys.exit(main())
