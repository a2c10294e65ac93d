"""Many faults at random instants: `python -m tests.faults.campaign [--seed N] [--each N]`, a table at the end.

Every fault hits a job that would otherwise end with known parameters. It has survived if the job, started again by
itself, ends with the same parameters, optimizer, averages, data positions and random numbers to the last bit, and
nothing is left behind.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.injection import ERRNOS, STEP_KINDS, Fault
from tests.faults.job import STEPS, WORLD, Outcome, left_behind, resume_until_done

AT_INSTANTS = ("kill", "kill all", "system", "stop", "slow", "store")
KINDS = (*AT_INSTANTS, *STEP_KINDS)


@dataclass(frozen=True)
class Undisturbed:
    """What the job ends with, and how many instants each rank has on the way."""

    final: list[tuple[str, str]]
    instants: list[int]


def digests(outcome: Outcome) -> list[tuple[str, str]]:
    return [(final["full"], final["own"]) for final in outcome.final]


def undisturbed(path: Path) -> Undisturbed:
    outcome = resume_until_done(path, None)
    assert outcome.attempts == 1 and left_behind(path) == []
    assert outcome.final[0]["full"] == outcome.final[1]["full"] != ""
    return Undisturbed(digests(outcome), outcome.instants)


def random_fault(kind: str, generator: random.Random, instants: list[int]) -> Fault:
    rank = generator.randrange(WORLD)
    if kind in AT_INSTANTS:
        return Fault(kind, rank, generator.randint(1, instants[rank]), generator.choice(ERRNOS))
    return Fault(kind, rank, generator.randint(1, STEPS))


def verdict(path: Path, fault: Fault, expected: Undisturbed) -> str | None:
    """What is wrong after a fault, None if nothing is."""
    try:
        outcome = resume_until_done(path, fault)
    except RuntimeError as error:
        return str(error)
    if digests(outcome) != expected.final:
        what = [
            f"rank {rank}: {name}"
            for rank, pair in enumerate(zip(digests(outcome), expected.final, strict=True))
            for name, seen, known in zip(("state", "own state"), *pair, strict=True)
            if seen != known
        ]
        return f"{fault}: ended otherwise than the undisturbed run: {', '.join(what)}"
    if outcome.hung:
        return f"{fault}: {outcome.hung} ranks hung without a report"
    if (
        fault.kind in STEP_KINDS
        and fault.kind != "exit"
        and not any("Error" in r or "Broken" in r for r in outcome.reports)
    ):
        return f"{fault}: nobody reported it: {outcome.reports}"
    return f"{fault}: left behind {left}" if (left := left_behind(path)) else None


def faults(seed: int, each: int, instants: list[int], kinds: tuple[str, ...] = KINDS) -> Iterator[Fault]:
    generator = random.Random(seed)
    for _ in range(each):
        for kind in kinds:
            yield random_fault(kind, generator, instants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=200, help="faults of each kind")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fault after this time")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    counts = dict.fromkeys(options.kinds, 0)
    failures: list[str] = []
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        expected = undisturbed(Path(name) / "undisturbed")
        print(f"undisturbed: {expected.instants} instants on the two ranks", flush=True)
        for number, fault in enumerate(faults(options.seed, options.each, expected.instants, tuple(options.kinds))):
            if time.monotonic() > end:
                break
            path = Path(name) / str(number)
            wrong = verdict(path, fault, expected)
            counts[fault.kind] += 1
            if wrong:
                failures.append(wrong)
                print(wrong, flush=True)
            shutil.rmtree(path)
            if number % 50 == 49:
                print(f"{number + 1} faults, {len(failures)} not survived", flush=True)
    for kind, count in counts.items():
        print(f"{kind}: {count} injected, {sum(f'kind={kind!r}' in text for text in failures)} not survived")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
