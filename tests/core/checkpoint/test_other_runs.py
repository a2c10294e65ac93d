"""`directory.py`: of two runs that save to one directory the second to save is refused; a restart never is."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from shardkit.core.checkpoint import CheckpointError, CheckpointManager, TrainingState
from tests.support import on_ranks

STATE = TrainingState(torch.nn.Linear(2, 1))


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


@pytest.mark.parametrize("step", [2, 3, 4])
def test_the_second_to_save_is_refused(tmp_path: Path, step: int):
    """The second run is refused whether the first one's step is older, the same or newer."""
    CheckpointManager(tmp_path).save(1, STATE, blocking=True)
    elder, younger = CheckpointManager(tmp_path, keep=1), CheckpointManager(tmp_path, keep=1)
    elder.save(2, STATE, blocking=True)
    younger_step = {2: 2, 3: 3, 4: 1}[step]
    text = r"gained step-000002 since this run began, and this run has not saved it: another run saves to the same"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=text):
            younger.save(younger_step, STATE, blocking=True)
        assert names(tmp_path) == ["step-000002"]
    elder.save(3, STATE, blocking=True)
    assert names(tmp_path) == ["step-000003"]


def test_one_that_took_the_place_of_ours(tmp_path: Path):
    first = CheckpointManager(tmp_path)
    first.save(1, STATE, blocking=True)
    CheckpointManager(tmp_path).save(1, STATE, blocking=True)  # of the same step: replaced
    with pytest.raises(CheckpointError, match="gained step-000001 since this run began"):
        first.save(2, STATE, blocking=True)


def test_who_only_looks_and_who_starts_again_is_let_alone(tmp_path: Path):
    (tmp_path / ".step-000009.ab.incomplete").mkdir()  # of a run that died
    for number in range(1, 4):
        run = CheckpointManager(tmp_path, keep=2)
        for step in (2 * number, 2 * number + 1, 2 * number):  # forth and back
            run.save(step, STATE, blocking=True)
            assert CheckpointManager(tmp_path).restore(STATE).step == run.checkpoints()[-1].step
    shutil.rmtree(tmp_path / "step-000006")  # by hand
    run.save(8, STATE, blocking=True)


@on_ranks(2)
def test_all_ranks_hear_of_it(rank: int, world_size: int, tmp_path: Path) -> None:
    one, other = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    one.save(1, STATE, blocking=True)
    text = f"^saving step 2 to {tmp_path} failed on rank 0: {tmp_path} gained step-000001 since"
    with pytest.raises(CheckpointError, match=text):
        other.save(2, STATE, blocking=True)
    assert names(tmp_path) == ["step-000001"]


@pytest.mark.parametrize("how", ["cut off", "missing", "a pipe"])
def test_a_manifest_that_is_damaged_ends_no_run(tmp_path: Path, how: str):
    run = CheckpointManager(tmp_path)
    run.save(1, STATE, blocking=True)
    manifest = tmp_path / "step-000001" / "manifest.json"
    if how == "cut off":
        os.truncate(manifest, 50)
    else:
        manifest.unlink()
    if how == "a pipe":
        os.mkfifo(manifest)
    run.save(2, STATE, blocking=True)
    assert run.restore(STATE).step == 2
