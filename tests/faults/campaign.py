"""Many faults at random instants, and a table: `python -m tests.faults.campaign [--each N] [--jobs N] [--out FILE]`.

A fault of a job hits two ranks that would otherwise end with known parameters. It has survived if the job, started
again by itself, ends with the same parameters, optimizer, averages, data positions and random numbers to the last bit,
and nothing is left behind. `damage.py` says when faults of files and disks count as survived.

Fault number `n` of a kind is the same for the same seed, in whatever order and by however many processes they are
tried. With `--out` each result is a line of a file as soon as it is known; another run of the command goes on from
there, and tries again the faults that were not survived; the file and the table keep every outcome.
"""

import argparse
import functools
import json
import multiprocessing
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.faults.damage import DISK_KINDS, FILE_KINDS, Pristine, Seen, can_mount, try_disk, try_file
from tests.faults.injection import ERRNOS, STEP_KINDS, Fault
from tests.faults.job import STEPS, WORLD, Outcome, left_behind, resume_until_done

AT_INSTANTS = ("kill", "kill all", "system", "writer", "stop", "slow", "store")
JOB_KINDS = (*AT_INSTANTS, *STEP_KINDS)
KINDS = (*JOB_KINDS, *FILE_KINDS, *DISK_KINDS)
_REPORTED = {*STEP_KINDS, "writer", "system"} - {"exit"}
"""Kinds that a rank can tell of."""


@dataclass(frozen=True)
class Result:
    """One line of the results."""

    kind: str
    number: int
    seed: int
    fault: str
    struck: str | None
    wrong: str | None
    seconds: float


def undisturbed(path: Path) -> Outcome:
    """A job that no fault hit."""
    outcome = resume_until_done(path, None)
    assert outcome.attempts == 1 and left_behind(path) == []
    assert outcome.final[0]["full"] == outcome.final[1]["full"] != ""
    return outcome


def random_fault(kind: str, generator: random.Random, instants: list[int]) -> Fault:
    rank = generator.randrange(WORLD)
    if kind in AT_INSTANTS:
        return Fault(kind, rank, generator.randint(1, instants[rank]), generator.choice(ERRNOS))
    return Fault(kind, rank, generator.randint(1, STEPS))


def verdict(path: Path, fault: Fault, expected: Outcome) -> Seen:
    """Runs a job with a fault, and judges its end."""
    try:
        outcome = resume_until_done(path, fault)
    except RuntimeError as error:
        return Seen("?", str(error))
    other = [
        f"rank {rank}: {name}"
        for rank, (seen, known) in enumerate(zip(outcome.final, expected.final, strict=True))
        for name in ("full", "own")
        if seen[name] != known[name]
    ]
    wrong: str | None = None
    if other:
        wrong = f"ended otherwise than the undisturbed run: {', '.join(other)}"
    elif outcome.hung:
        wrong = f"{outcome.hung} ranks hung without a report"
    elif outcome.attempts > 1 and fault.kind in _REPORTED and not any(_tells(r) for r in outcome.reports):
        wrong = f"nobody reported it: {outcome.reports}"
    elif fault.kind in STEP_KINDS and outcome.attempts == 1:
        wrong = "the job went on as if nothing had been"
    elif left := left_behind(path, removal_failed=fault.kind == "system"):
        wrong = f"left behind: {left}"
    return Seen(outcome.struck, wrong and f"{fault}: {wrong}")


def _tells(report: str) -> bool:
    return "Error" in report or "Broken" in report


@functools.cache
def pristine(path: Path, full: str) -> Pristine:
    """The checkpoints that faults of files start from; made once in each process."""
    return Pristine.of(path / "checkpoints", full)


def try_one(kind: str, number: int, seed: int, expected: Outcome, root: Path) -> Result:
    """Fault `number` of a kind, in a directory of its own."""
    generator = random.Random(f"{seed} {kind} {number}")
    begin = time.monotonic()
    scratch = root / f"{kind}-{number}".replace(" ", "-")
    what = kind
    try:
        if kind in FILE_KINDS:
            seen = try_file(kind, generator, pristine(expected.path, expected.final[0]["full"]), scratch)
        elif kind in DISK_KINDS:
            seen = try_disk(kind, generator, scratch)
        else:
            fault = random_fault(kind, generator, expected.instants)
            what = str(fault)
            seen = verdict(scratch, fault, expected)
    except Exception:  # noqa: BLE001 (one more that was not survived)
        seen = Seen("?", traceback.format_exc())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Result(kind, number, seed, what, seen.struck, seen.wrong, round(time.monotonic() - begin, 2))


# -- the command ------------------------------------------------------------------------------------------------------


def surroundings() -> dict[str, object]:
    """The commit, machine and versions of the results."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "linux": platform.release()}
    return {"commit": commit.stdout.strip(), "machine": platform.machine(), **versions}


Outcomes = dict[tuple[str, int, int], list[Result]]
"""By kind, number and seed: every outcome of a fault, in the order in which it was tried."""


def known(out: Path | None) -> Outcomes:
    """The results that stand in a file."""
    outcomes: Outcomes = {}
    for line in out.read_text().splitlines() if out is not None and out.exists() else ():
        if "kind" in (fields := json.loads(line)):
            outcomes.setdefault((fields["kind"], fields["number"], fields["seed"]), []).append(Result(**fields))
    return outcomes


def table(outcomes: Iterable[list[Result]]) -> str:
    """For each kind, how its faults ended and at which instants they struck; a fault that was repeated counts once.

    *at once*: survived whenever it was tried. *when repeated*: survived when it was tried last, and not before.
    """
    rows = [
        "kind | injected | survived at once | when repeated | not survived | runs | ended before it struck | instants",
        "---|---|---|---|---|---|---|---",
    ]
    outcomes = list(outcomes)
    for kind in KINDS:
        found = [runs for runs in outcomes if runs[0].kind == kind]
        injected = [struck for runs in found if (struck := [one for one in runs if one.struck is not None])]
        at_once = sum(all(one.wrong is None for one in runs) for runs in injected)
        survived = sum(runs[-1].wrong is None for runs in injected)
        where = Counter(str(runs[-1].struck) for runs in injected)
        told = ", ".join(f"{name} {count}" for name, count in where.most_common())
        counts = (len(injected), at_once, survived - at_once, len(injected) - survived, sum(map(len, found)))
        rows.append(f"{kind} | {' | '.join(map(str, counts))} | {len(found) - len(injected)} | {told}")
    return "\n".join(rows)


def run(options: argparse.Namespace, root: Path) -> Outcomes:
    """Tries the faults without a result, and again those that were not survived the last time."""
    outcomes = known(options.out)
    wanted = [(kind, number, options.seed) for number in range(options.each) for kind in options.kinds]
    todo = [key for key in wanted if key not in outcomes or outcomes[key][-1].wrong is not None]
    expected = undisturbed(root / "undisturbed")
    _add(options.out, surroundings() | {"seed": options.seed, "instants": expected.instants})
    print(f"{len(todo)} of {len(wanted)} faults to try", flush=True)
    # Spawned: each process has a server of its own that its ranks are forked from.
    pool = ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"))
    try:
        pending = {pool.submit(try_one, *key, expected, root): key for key in todo}
        for number, future in enumerate(as_completed(pending), 1):
            one = future.result()
            outcomes.setdefault(pending[future], []).append(one)
            _add(options.out, asdict(one))
            if one.wrong is not None:
                print(f"NOT SURVIVED: {one.kind} {one.number}: {one.wrong}", flush=True)
            if number % 50 == 0:
                print(f"{number} of {len(todo)}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return {key: outcomes[key] for key in wanted}


def _add(out: Path | None, line: dict[str, object]) -> None:
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=200, help="faults of each kind")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at the same time")
    parser.add_argument("--out", type=Path, help="a file of JSON lines to add results to, and to go on from")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; the same command goes on from here"))
    if "full" in options.kinds and not can_mount():
        parser.error("only root can make the small file systems that 'full' needs; name other --kinds")
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        outcomes = run(options, Path(name))
    print(table(outcomes.values()))
    raise SystemExit(any(runs[-1].wrong is not None for runs in outcomes.values()))


if __name__ == "__main__":
    main()
