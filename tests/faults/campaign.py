"""Many faults at random instants, and a table: `python -m tests.faults.campaign [--each N] [--seed N] [--kinds ...]`.

A fault of a job hits two ranks that would otherwise end with known parameters. It has survived if the job, started
again by itself, ends with the same parameters, optimizer, averages, data positions and random numbers to the last bit,
and nothing is left behind. `damage.py` says when faults of files and disks count as survived.

Fault number `n` of a kind is the same for the same seed.
"""

import argparse
import functools
import random
import shutil
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.faults.damage import DISK_KINDS, FILE_KINDS, Pristine, Seen, can_mount, try_disk, try_file
from tests.faults.injection import ERRNOS, STEP_KINDS, Fault
from tests.faults.job import STEPS, WORLD, Outcome, left_behind, resume_until_done

AT_INSTANTS = ("kill", "kill all", "system", "writer", "stop", "slow", "store")
JOB_KINDS = (*AT_INSTANTS, *STEP_KINDS)
KINDS = (*JOB_KINDS, *FILE_KINDS, *DISK_KINDS)
_REPORTED = {*STEP_KINDS, "writer", "system"} - {"exit"}
"""Kinds that a rank can tell of."""


@dataclass(frozen=True)
class Result(Seen):
    """The outcome of one fault of a kind."""

    kind: str


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
    scratch = root / f"{kind}-{number}".replace(" ", "-")
    try:
        if kind in FILE_KINDS:
            seen = try_file(kind, generator, pristine(expected.path, expected.final[0]["full"]), scratch)
        elif kind in DISK_KINDS:
            seen = try_disk(kind, generator, scratch)
        else:
            seen = verdict(scratch, random_fault(kind, generator, expected.instants), expected)
    except Exception:  # noqa: BLE001 (one more that was not survived)
        seen = Seen("?", traceback.format_exc())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Result(seen.struck, seen.wrong, kind)


def table(results: list[Result]) -> str:
    """For each kind, how its faults ended and at which instants they struck."""
    rows = ["kind | injected | survived | not survived | ended before it struck | instants", "---|---|---|---|---|---"]
    for kind in dict.fromkeys(one.kind for one in results):
        found = [one for one in results if one.kind == kind]
        injected = [one for one in found if one.struck is not None]
        survived = sum(one.wrong is None for one in injected)
        told = ", ".join(f"{name} {count}" for name, count in Counter(one.struck for one in injected).most_common())
        counts = (len(injected), survived, len(injected) - survived, len(found) - len(injected))
        rows.append(f"{kind} | {' | '.join(map(str, counts))} | {told}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=200, help="faults of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    if "full" in options.kinds and not can_mount():
        parser.error("only root can make the small file systems that 'full' needs; name other --kinds")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        expected = undisturbed(Path(name) / "undisturbed")
        for number in range(options.each):
            for kind in options.kinds:
                results.append(try_one(kind, number, options.seed, expected, Path(name)))
                if results[-1].wrong is not None:
                    print(f"NOT SURVIVED: {kind} {number}: {results[-1].wrong}", flush=True)
    print(table(results))
    raise SystemExit(any(one.wrong is not None for one in results))


if __name__ == "__main__":
    main()
