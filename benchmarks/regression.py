"""Holds a new comparison against the last saved one on the same machine; exits with 1 if a ratio has become worse.

    python benchmarks/compare.py --json new.json
    python benchmarks/regression.py new.json            compare
    python benchmarks/regression.py new.json --save     compare, then keep it: later runs are held against it

Ratios to other systems are compared, never times: the machine may be faster or slower today. See
benchmarks/METHOD.md.
"""

import argparse
import json
import sys
from pathlib import Path

from side_by_side.saved import RESULTS, Change, Run, changes, last_saved, machine, save


def main() -> int:
    """Every run in the given file; 1 if one is worse than the last saved."""
    args = _arguments()
    failed = False
    for run in json.loads(args.file.read_text())["runs"]:
        before = last_saved(run, args.results)
        print(f"\n{run['settings']['workload']}, {run['settings']['world_size']} ranks on {machine(run)}")
        if before is None:
            print(f"nothing saved of this in {args.results}, so nothing to hold it against")
        else:
            failed |= _report(before, run, args.tolerance)
        if args.save:
            print(f"saved {save(run, args.results)}")
    return int(failed)


def _report(before: Run, now: Run, tolerance: float) -> bool:
    print(f"since {before['surroundings']['commit']} of {before['surroundings']['date']}:")
    found = changes(before, now, tolerance)
    for change in found:
        print(_line(change, now["settings"]["systems"][0]))
    worse = sum(change.worse for change in found)
    print(f"{worse} of {len(found)} ratios are worse by more than {tolerance:.0%} and than they scatter")
    return worse > 0


def _line(change: Change, first: str) -> str:
    mark = "WORSE" if change.worse else ""
    return f"  {change.row}, {first} to {change.against}: {change.before:.3f} -> {change.now:.3f} {mark}".rstrip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a file written by compare.py --json")
    parser.add_argument("--save", action="store_true", help="afterwards, keep it under --results")
    parser.add_argument("--tolerance", type=float, default=0.1, help="growth of a ratio that is allowed (0.1)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="benchmarks/results/compare")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
