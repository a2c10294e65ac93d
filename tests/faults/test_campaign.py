"""A job that saves survives a fault of every kind, at an instant that a seed chooses.

A fault of a job hits two ranks that would otherwise end with known parameters. It has survived if the job, started
again by itself, ends with the same parameters, optimizer, averages, data positions and random numbers to the last bit,
and nothing is left behind. `damage.py` says when faults of files count as survived.

At night ten faults of each kind are tried; `SHARDKIT_FUZZ` multiplies their number.
"""

import dataclasses
import random
from pathlib import Path

import pytest

from tests.faults.damage import FILE_KINDS, Pristine, look, try_file
from tests.faults.fuzzing import FACTOR
from tests.faults.injection import ERRNOS, Fault
from tests.faults.job import STEPS, WORLD, Outcome, left_behind, resume_until_done
from tests.support import run_ranks
from tests.support.twins import assert_equal

JOB_KINDS = ("kill", "kill all", "call", "disk", "writer", "stop", "slow", "store", "branch")
_REPORTED = {"writer", "call", "disk", "branch"}
"""Kinds that a rank can tell of."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A job that no fault hit. Faults strike in the first half: a run whose ranks wait less has fewer instants."""
    path = tmp_path_factory.mktemp("faults") / "undisturbed"
    outcome = resume_until_done(path, None)
    assert outcome.attempts == 1 and left_behind(path) == []
    assert_equal(*(one["full"] for one in outcome.final))
    return dataclasses.replace(outcome, instants=[count // 2 for count in outcome.instants])


@pytest.fixture(scope="module")
def pristine(expected: Outcome) -> Pristine:
    """The checkpoints that faults of files start from."""
    return run_ranks(1, look, expected.path / "checkpoints", expected.final[0]["full"])[0]


def random_fault(kind: str, generator: random.Random, instants: list[int]) -> Fault:
    rank = generator.randrange(WORLD)
    at = generator.randint(1, STEPS if kind == "branch" else instants[rank])
    return Fault(kind, rank, at, generator.choice(ERRNOS))


def try_job(path: Path, fault: Fault, expected: Outcome) -> bool:
    """Runs a job with a fault, and judges its end. Tells whether the fault struck before."""
    outcome = resume_until_done(path, fault)
    assert_equal(outcome.final, expected.final, f"{fault}: ended otherwise than the undisturbed run")
    assert not outcome.hung, f"{fault}: {outcome.hung} ranks hung without a report"
    reported = any("Error" in one for one in outcome.reports)
    assert outcome.attempts == 1 or fault.kind not in _REPORTED or reported, f"{fault}: {outcome.reports}"
    assert fault.kind != "branch" or outcome.attempts > 1, f"{fault}: the job went on as if nothing had been"
    assert left_behind(path, removal_failed=fault.kind in ("call", "disk")) == [], fault
    return outcome.struck


@pytest.mark.timeout(120)
@pytest.mark.daily(kind=["kill", "call", "disk", "writer", "store", "branch", *FILE_KINDS], number=[0])
@pytest.mark.parametrize("number", range(int(10 * FACTOR)))
@pytest.mark.parametrize("kind", [*JOB_KINDS, *FILE_KINDS])
def test_a_fault_is_survived(tmp_path: Path, expected: Outcome, pristine: Pristine, kind: str, number: int):
    generator, scratch = random.Random(f"17 {kind} {number}"), tmp_path / "scratch"
    if kind in FILE_KINDS:
        (struck,) = run_ranks(1, try_file, kind, generator, pristine, scratch)
    else:
        struck = try_job(scratch, random_fault(kind, generator, expected.instants), expected)
    assert struck or number, "the job ended before the fault"
