"""`directory.py`: which checkpoints stay, and what two runs in one directory may do to each other."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.core.checkpoint import CheckpointError, CheckpointManager, TrainingState
from shardkit.core.checkpoint.commit import Header
from shardkit.core.checkpoint.directory import CheckpointDirectory
from shardkit.core.checkpoint.image import Image
from shardkit.core.checkpoint.pieces import Piece
from shardkit.core.checkpoint.saving import Save, Staged
from tests.core.test_checkpoint_format import flip


def test_retention_spares_what_was_just_saved(tmp_path: Path):
    """A run that goes back to an older checkpoint must not lose what it saves from there."""
    state = TrainingState(torch.nn.Linear(3, 2))
    manager = CheckpointManager(tmp_path)
    for step in (5, 6, 8):
        manager.save(step, state, blocking=True)
    manager = CheckpointManager(tmp_path, keep=1)
    manager.restore(state, step=6)
    manager.save(7, state, blocking=True)
    assert [one.step for one in manager.checkpoints()] == [7, 8]
    manager.save(8, state, blocking=True)
    assert [one.step for one in manager.checkpoints()] == [8]


def test_fallback_leaves_a_good_checkpoint(tmp_path: Path):
    """The newest one is damaged: what is saved after it was passed over stays, and can be restored."""
    state = TrainingState(torch.nn.Linear(3, 2))
    manager = CheckpointManager(tmp_path)
    for step in (6, 8):
        manager.save(step, state, blocking=True)
    flip(tmp_path / "step-000008" / "__0_0.distcp")
    manager = CheckpointManager(tmp_path, keep=1)
    for expected in (6, 7):
        restored = manager.restore(state, fallback=True)
        assert restored is not None and restored.step == expected
        manager.save(7, state, blocking=True)


def stage(values: torch.Tensor) -> Staged:
    piece = Piece(("model", "w"), values.dtype, tuple(values.shape), (0,) * values.ndim, tuple(values.shape))
    image = Image([piece], pinned=False)
    image.fill([values])
    return Staged(image.bytes(), [piece], [], [], [])


def test_another_manager_spares_what_is_being_written(tmp_path: Path):
    """To look into a directory, as an evaluation job does, must not end the save that a run has on its way."""
    directory = CheckpointDirectory(tmp_path)
    first, second = (
        Save(directory, "ab", Header(1, 2, {}), rank, stage(torch.arange(4.0) + rank), None, timeout=60)
        for rank in (0, 1)
    )
    first.start()
    assert first.await_part() is None
    assert CheckpointManager(tmp_path).checkpoints() == []
    second.start()
    assert second.await_commit() is None and first.await_commit() is None
    assert [one.step for one in directory.complete()] == [1]


def test_what_dead_runs_have_left_goes(tmp_path: Path):
    (tmp_path / "step-000002").mkdir()
    for name in ("1.ab.incomplete", "1.cd.deleted", "2.ab.replaced", "3.ab.replaced"):
        (tmp_path / f".step-00000{name}").mkdir()
        (tmp_path / f".step-00000{name}" / "part-0.json").write_text("")
    CheckpointManager(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_new_directories_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each entry on the way to a checkpoint is synced in the directory that it lies in."""
    synced, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    path = tmp_path / "a" / "b" / "c"
    CheckpointManager(path).save(1, TrainingState(torch.nn.Linear(1, 1)), blocking=True)
    for made in (path, path.parent, path.parent.parent):
        assert str(made.parent) in synced
    assert synced[-1] == str(path)
    assert [Path(one).name.split(".")[-1] for one in synced[-5:-1]] == ["distcp", "metadata", "json", "incomplete"]


def test_a_checkpoint_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = TrainingState(torch.nn.Linear(1, 1))
    manager = CheckpointManager(tmp_path)
    manager.save(1, state, blocking=True)
    rename = Path.rename

    def failing(source: Path, target: Path) -> Path:
        if source.name.endswith(".incomplete"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        manager.save(1, state, blocking=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def _in_use(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


def test_what_cannot_be_removed_fails_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a network file system, where a file that someone reads stays under another name until it is closed."""
    state = TrainingState(torch.nn.Linear(1, 1))
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, state, blocking=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", _in_use)
        manager.save(1, state, blocking=True)
        manager.save(2, state, blocking=True)
    assert [one.step for one in manager.checkpoints()] == [2]
    assert len(list(tmp_path.iterdir())) == 3
    CheckpointManager(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_disk_that_fails_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So that `fallback` takes the checkpoint before, which may lie elsewhere on the disk."""
    state = TrainingState(torch.nn.Linear(1, 1))
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, state, blocking=True)
    preadv = os.preadv

    def failing(descriptor: int, *arguments: Any) -> int:
        if "step-000002" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", failing)
    restored = manager.restore(state, fallback=True)
    assert restored is not None and restored.step == 1
    assert "__0_0.distcp cannot be read from byte 0 on: Input/output error" in restored.damaged[0]


def test_what_nobody_may_remove_hides_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An evaluation that may only read a directory in which a run has died."""
    state = TrainingState(torch.nn.Linear(1, 1))
    CheckpointManager(tmp_path).save(1, state, blocking=True)
    (tmp_path / ".step-000002.ab.incomplete").mkdir()

    def refused(source: Path, target: Path) -> Path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        assert CheckpointManager(tmp_path).restore(state).step == 1
