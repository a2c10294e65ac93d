"""The saved comparison of each configuration, and whether a new one on the same machine is worse."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "compare"

Run = Mapping[str, Any]
"""One entry of `runs` in a file of `compare.py --json`."""


@dataclass(frozen=True)
class Change:
    """A ratio to another system: medians of the saved run and of the new one."""

    row: str
    against: str
    before: float
    now: float
    worse: bool


def machine(run: Run) -> str:
    """A description of the machine: runs are only compared with runs on the same."""
    facts = run["surroundings"]
    return ", ".join(str(facts[name]) for name in ("cpu", "cores", "system", "gpu") if name in facts)


def save(run: Run, results: Path = RESULTS) -> Path:
    """Writes `run` to the one file of its configuration, in place of the run before; git keeps the history."""
    results.mkdir(parents=True, exist_ok=True)
    path = _path(run, results)
    path.write_text(json.dumps(run, indent=1) + "\n")
    return path


def last_saved(run: Run, results: Path = RESULTS) -> Run | None:
    """The saved run of the same configuration, None if there is none or if it was taken on another machine."""
    path = _path(run, results)
    if not path.exists():
        return None
    saved: Run = json.loads(path.read_text())
    return saved if machine(saved) == machine(run) else None


def _path(run: Run, results: Path) -> Path:
    name = "_".join(map(str, _configuration(run)))
    return results / (re.sub(r"[^\w.+-]", "-", name) + ".json")


def changes(before: Run, now: Run, tolerance: float) -> list[Change]:
    """Every ratio that both runs have, first system to each other one.

    One is worse if its median has grown by more than `tolerance` of itself, and more than it scatters: its lower
    quartile lies above the upper one of the saved run. A count has no scatter.
    """
    known = {(row["key"], name): ratio for row in before["rows"] for name, ratio in row["ratios"].items()}
    found = []
    for row in now["rows"]:
        for name, ratio in row["ratios"].items():
            if (old := known.get((row["key"], name))) is None:
                continue
            grown = ratio["median"] > old["median"] * (1 + tolerance)
            clearly = ratio["first_quartile"] > old["third_quartile"]
            found.append(Change(row["label"].strip(), name, old["median"], ratio["median"], grown and clearly))
    return found


def _configuration(run: Run) -> tuple[str | int, ...]:
    settings = run["settings"]
    usual = (settings["workload"], settings["world_size"], settings["device"], settings["systems"][0])
    special = (settings.get("optimizer", "adamw"), settings.get("link") or "loopback")
    return (*usual, *(value for value in special if value not in ("adamw", "loopback")))
