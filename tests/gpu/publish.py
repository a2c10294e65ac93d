"""Puts the results of a run on a GPU into benchmarks/results/gpu, the benchmarks page and the README.

    python -m tests.gpu.publish DIR

The table stands between two comments in each page. Estimates that the GPU's machine could not make are made here.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- results on GPUs begin -->", "<!-- results on GPUs end -->"
_FIRST = {"ms": "ms a step", "allocated": "MiB allocated"}
_PAGES = {
    "README.md": _FIRST,
    "docs/explanation/benchmarks.md": {**_FIRST, "host_ms": "ms of the host", "reserved_after": "MiB reserved"},
}
"""The pages, and the figures that each shows."""
_RESULTS = "benchmarks/results/gpu"


def publish(directory: Path, root: Path = ROOT) -> Path:
    """Writes the results and the table below `root`; returns the file of the results."""
    run = json.loads((directory / "results.json").read_text())
    if run["facts"]["gpu"] is None:
        raise SystemExit(f"{directory} holds a run without a GPU, which says nothing to publish")
    for row in run["rows"]:
        waits = row["check"] == "estimates" and row["state"] == "skipped"
        if waits and importlib.util.find_spec("msgspec") is not None:
            from tests.gpu.tools import compared

            row |= {"state": "ok", "note": "", "figures": compared(directory)}
    path = root / _RESULTS / f"{run['facts']['gpu'].lower().replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n")
    runs = [json.loads(one.read_text()) for one in sorted(path.parent.glob("*.json"))]
    for page, names in _PAGES.items():
        before, _, rest = (root / page).read_text().partition(BEGIN)
        table = "\n\n".join("\n".join(_table(one, names)) for one in runs)
        (root / page).write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    return path


def _table(run: dict[str, Any], names: dict[str, str]) -> Iterator[str]:
    """The card, the checks that did not hold, and the figures `names` of stock beside ours."""
    facts, rows = run["facts"], run["rows"]
    bad = [row for row in rows if row["state"] in ("failed", "hung")]
    held = sum(row["state"] == "ok" for row in rows)
    named = "; ".join(f"{row['part']}: {row['job']}, {row['check']}" for row in bad)
    versions = f"torch {facts['torch']}, NCCL {facts['nccl']}, commit {facts['commit']}, {facts['date']}"
    yield f"`python3 -m tests.gpu` on one {facts['gpu']} ({versions}):"
    yield f"{held} checks held, {len(bad)} did not{f' ({named})' if named else ''}."
    yield ""
    yield "| | FSDP2 | shardkit | ratio |"
    yield "|---|---|---|---|"
    for row in rows:
        stock, ours = ((row["figures"] or {}).get(engine) for engine in ("stock", "ours"))
        for name, unit in names.items() if isinstance(stock, dict) and isinstance(ours, dict) else ():
            if stock.get(name) and name in ours:
                ratio = f"{ours[name] / stock[name]:.2f}"
                yield f"| {row['check']}, {row['job']}: {unit} | {stock[name]:g} | {ours[name]:g} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="the --out of tests.gpu")
    path = publish(parser.parse_args().directory)
    print(f"wrote {path}, and the tables of {' and '.join(_PAGES)}")
    print("look for other pages that say that nothing has run on a GPU: git grep -n 'a GPU yet'")


if __name__ == "__main__":
    sys.exit(main())
