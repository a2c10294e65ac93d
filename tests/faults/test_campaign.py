"""A short campaign: a fault of every kind, at an instant that a seed chooses. `tests.faults.campaign` has long ones."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.faults.campaign import KINDS, pristine, table, try_one, undisturbed, verdict
from tests.faults.damage import DISK_KINDS, FILE_KINDS, can_mount, try_file
from tests.faults.injection import STEP_KINDS, Fault
from tests.faults.job import Outcome

_SEED = 17


@pytest.fixture(scope="module", autouse=True)
def no_process_group_stays() -> Iterator[None]:
    """Files are tried in this process, in a process group of one rank."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Faults strike in the first half: a run whose ranks wait less has fewer instants."""
    found = undisturbed(tmp_path_factory.mktemp("faults") / "undisturbed")
    return dataclasses.replace(found, instants=[count // 2 for count in found.instants])


@pytest.mark.timeout(120)
@pytest.mark.daily(kind=["kill", "system", "writer", "store", *STEP_KINDS, *FILE_KINDS, *DISK_KINDS])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_survived(tmp_path: Path, expected: Outcome, kind: str):
    if kind == "full" and not can_mount():
        pytest.skip("only root can make a small file system")
    result = try_one(kind, 0, _SEED, expected, tmp_path)
    assert result.wrong is None
    assert result.struck is not None, "the job ended before the fault"
    assert f"{kind} | 1 | 1 | 0 | 0 | {result.struck}" in table([result])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_a_run_that_goes_on_wrongly_is_noticed(tmp_path: Path, expected: Outcome):
    """The comparison can fail: the undisturbed job is given other final parameters."""
    other = dataclasses.replace(expected, final=[{"full": "", "own": ""}] * 2)
    wrong = verdict(tmp_path, Fault("slow", 0, 3), other).wrong
    assert wrong is not None and "ended otherwise than the undisturbed run: rank 0: full, rank 0: own" in wrong


def test_files_that_restore_otherwise_are_noticed(tmp_path: Path, expected: Outcome):
    known = pristine(expected.path, expected.final[0]["full"])
    known = dataclasses.replace(known, older="", newer="")
    wrong = try_file("flipped", random.Random(1), known, tmp_path / "copy").wrong
    assert wrong is not None and "restored" in wrong and "otherwise" in wrong
