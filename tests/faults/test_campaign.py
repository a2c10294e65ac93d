"""A job that saves survives a fault of every kind, at an instant that a seed chooses.

A fault of a job hits two ranks that would otherwise end with known parameters. It has survived if the job, started
again by itself, ends with the same parameters, optimizer, averages, data positions and random numbers to the last bit,
and nothing is left behind. `damage.py` says when faults of files count as survived.

At night ten faults of each kind are tried; `SHARDKIT_FUZZ` multiplies their number.
"""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.faults.damage import FILE_KINDS, Pristine, Seen, try_file
from tests.faults.fuzzing import FACTOR
from tests.faults.injection import ERRNOS, Fault
from tests.faults.job import STEPS, WORLD, Outcome, left_behind, resume_until_done
from tests.support.twins import differences

JOB_KINDS = ("kill", "kill all", "call", "disk", "writer", "stop", "slow", "store", "branch")
_REPORTED = {"writer", "call", "disk", "branch"}
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
    assert differences(*(one["full"] for one in outcome.final)) == []
    return dataclasses.replace(outcome, instants=[count // 2 for count in outcome.instants])


@pytest.fixture(scope="module")
def pristine(expected: Outcome) -> Pristine:
    """The checkpoints that faults of files start from."""
    return Pristine.of(expected.path / "checkpoints", expected.final[0]["full"])


def random_fault(kind: str, generator: random.Random, instants: list[int]) -> Fault:
    rank = generator.randrange(WORLD)
    at = generator.randint(1, STEPS if kind == "branch" else instants[rank])
    return Fault(kind, rank, at, generator.choice(ERRNOS))


def verdict(path: Path, fault: Fault, expected: Outcome) -> Seen:
    """Runs a job with a fault, and judges its end."""
    try:
        outcome = resume_until_done(path, fault)
    except RuntimeError as error:
        return Seen(True, str(error))
    wrong: str | None = None
    if other := differences(outcome.final, expected.final):
        wrong = f"ended otherwise than the undisturbed run: {', '.join(other)}"
    elif outcome.hung:
        wrong = f"{outcome.hung} ranks hung without a report"
    elif outcome.attempts > 1 and fault.kind in _REPORTED and not any("Error" in one for one in outcome.reports):
        wrong = f"nobody reported it: {outcome.reports}"
    elif fault.kind == "branch" and outcome.attempts == 1:
        wrong = "the job went on as if nothing had been"
    elif left := left_behind(path, removal_failed=fault.kind in ("call", "disk")):
        wrong = f"left behind: {left}"
    return Seen(outcome.struck, wrong and f"{fault}: {wrong}")


@pytest.mark.timeout(120)
@pytest.mark.daily(kind=["kill", "call", "disk", "writer", "store", "branch", *FILE_KINDS], number=[0])
@pytest.mark.parametrize("number", range(int(10 * FACTOR)))
@pytest.mark.parametrize("kind", [*JOB_KINDS, *FILE_KINDS])
def test_a_fault_is_survived(tmp_path: Path, expected: Outcome, pristine: Pristine, kind: str, number: int):
    generator, scratch = random.Random(f"17 {kind} {number}"), tmp_path / "scratch"
    if kind in FILE_KINDS:
        seen = try_file(kind, generator, pristine, scratch)
    else:
        seen = verdict(scratch, random_fault(kind, generator, expected.instants), expected)
    assert seen.wrong is None
    assert seen.struck or number, "the job ended before the fault"
