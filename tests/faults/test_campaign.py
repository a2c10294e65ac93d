"""A job that saves survives a fault of every kind, at an instant that a seed chooses.

A fault of a job hits two ranks that would otherwise end with known parameters. It has survived if the job, started
again by itself, ends with the same parameters, optimizer, averages, data positions and random numbers to the last bit,
and nothing is left behind. `damage.py` says when faults of files and disks count as survived.

At night ten faults of each kind are tried; `SHARDKIT_FUZZ` multiplies their number.
"""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.faults.damage import DISK_KINDS, FILE_KINDS, Pristine, Seen, can_mount, try_disk, try_file
from tests.faults.fuzzing import FACTOR
from tests.faults.injection import ERRNOS, STEP_KINDS, Fault
from tests.faults.job import STEPS, WORLD, Outcome, left_behind, resume_until_done

AT_INSTANTS = ("kill", "kill all", "system", "writer", "stop", "slow", "store")
JOB_KINDS = (*AT_INSTANTS, *STEP_KINDS)
KINDS = (*JOB_KINDS, *FILE_KINDS, *DISK_KINDS)
_REPORTED = {*STEP_KINDS, "writer", "system"} - {"exit"}
"""Kinds that a rank can tell of."""


@pytest.fixture(scope="module", autouse=True)
def no_process_group_stays() -> Iterator[None]:
    """Files are tried in this process, in a process group of one rank."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A job that no fault hit. Faults strike in the first half: a run whose ranks wait less has fewer instants."""
    path = tmp_path_factory.mktemp("faults") / "undisturbed"
    outcome = resume_until_done(path, None)
    assert outcome.attempts == 1 and left_behind(path) == []
    assert outcome.final[0]["full"] == outcome.final[1]["full"] != ""
    return dataclasses.replace(outcome, instants=[count // 2 for count in outcome.instants])


@pytest.fixture(scope="module")
def pristine(expected: Outcome) -> Pristine:
    """The checkpoints that faults of files start from."""
    return Pristine.of(expected.path / "checkpoints", expected.final[0]["full"])


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


@pytest.mark.timeout(120)
@pytest.mark.daily(kind=["kill", "system", "writer", "store", *STEP_KINDS, *FILE_KINDS, *DISK_KINDS], number=[0])
@pytest.mark.parametrize("number", range(int(10 * FACTOR)))
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_survived(tmp_path: Path, expected: Outcome, pristine: Pristine, kind: str, number: int):
    if kind == "full" and not can_mount():
        pytest.skip("only root can make a small file system")
    generator, scratch = random.Random(f"17 {kind} {number}"), tmp_path / "scratch"
    if kind in FILE_KINDS:
        seen = try_file(kind, generator, pristine, scratch)
    elif kind in DISK_KINDS:
        seen = try_disk(kind, generator, scratch)
    else:
        seen = verdict(scratch, random_fault(kind, generator, expected.instants), expected)
    assert seen.wrong is None
    assert seen.struck is not None or number, "the job ended before the fault"
