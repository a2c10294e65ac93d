"""A short campaign: a fault of every kind, at an instant that a seed chooses. `tests.faults.campaign` has long ones."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.faults.campaign import KINDS, table, try_one, undisturbed
from tests.faults.damage import DISK_KINDS, FILE_KINDS, can_mount
from tests.faults.injection import STEP_KINDS
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
