"""`directory.py`: which checkpoints stay, and how two runs in one directory may affect each other."""

import builtins
import errno
import io
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardkit.core.checkpoint import CheckpointError, CheckpointManager, DamagedCheckpointError, TrainingState
from shardkit.core.checkpoint.command import main
from shardkit.core.checkpoint.directory import CheckpointDirectory, remove_unless_written, writing_in
from shardkit.core.checkpoint.plan import Piece, Plan
from shardkit.core.checkpoint.saving import Header, Image, Save
from tests.core.checkpoint.trainee import flip, saved
from tests.support import on_ranks

STATE = TrainingState(torch.nn.Linear(1, 1))


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


def test_retention_spares_what_was_just_saved(tmp_path):
    """A run that goes back to an older checkpoint must not lose the checkpoints that it saves from there."""
    saved(tmp_path, STATE, 5, 6, 8)
    manager = CheckpointManager(tmp_path, keep=1)
    manager.restore(STATE, step=6)
    manager.save(7, STATE, blocking=True)
    assert [one.step for one in manager.checkpoints()] == [7, 8]
    manager.save(8, STATE, blocking=True)
    assert [one.step for one in manager.checkpoints()] == [8]


def to_save(values: torch.Tensor) -> tuple[Plan, Image]:
    piece = Piece(("model", "w"), values.dtype, tuple(values.shape), (0,) * values.ndim, tuple(values.shape))
    return Plan(told=[piece], values=[values]), Image([piece], pinned=False)


def test_another_manager_spares_what_is_being_written(tmp_path):
    """A job that only reads the directory, such as an evaluation, must not end a save that a run has in progress."""
    directory = CheckpointDirectory(tmp_path)
    first, second = (
        Save(directory, "ab", Header(1, 2, {}), rank, *to_save(torch.arange(4.0) + rank), None, timeout=60)
        for rank in (0, 1)
    )
    first.start()
    assert first.await_part() is None
    assert CheckpointManager(tmp_path).checkpoints() == []
    second.start()
    assert second.await_commit() is None and first.await_commit() is None
    (found,) = directory.complete()
    assert found.step == 1
    assert names(found.path) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]


def test_what_dead_runs_have_left_goes(tmp_path):
    """Of one that died between the renames, the new checkpoint may be incomplete, so the old one comes back."""
    (tmp_path / "step-000002").mkdir()
    for name in ("1.ab.incomplete", "1.cd.deleted", "2.ab.replaced", "3.ab.incomplete", "3.ab.replaced"):
        (tmp_path / f".step-00000{name}").mkdir()
        (tmp_path / f".step-00000{name}" / "part-0.json").write_text(name)
    CheckpointManager(tmp_path)
    assert names(tmp_path) == ["step-000002", "step-000003"]
    assert (tmp_path / "step-000003" / "part-0.json").read_text() == "3.ab.replaced"


def test_a_checkpoint_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    manager = saved(tmp_path, STATE, 1)
    rename = Path.rename

    def failing(source: Path, target: Path) -> Path:
        if source.name.endswith(".incomplete"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        manager.save(1, STATE, blocking=True)
    assert names(tmp_path) == ["step-000001"]


@pytest.mark.parametrize("again", ["a later save", "the next run"])
def test_what_cannot_be_removed_fails_no_save(tmp_path, again: str):
    """As on a network file system, where a file that someone reads stays under another name until it is closed."""
    manager, in_use = saved(tmp_path, STATE, 1, keep=1), OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    with mock.patch.object(os, "rmdir", side_effect=in_use):
        manager.save(1, STATE, blocking=True)
        manager.save(2, STATE, blocking=True)
    assert [one.step for one in manager.checkpoints()] == [2]
    assert sorted(path.name.split(".")[-1] for path in tmp_path.iterdir()) == ["deleted", "deleted", "step-000002"]
    if again == "the next run":
        CheckpointManager(tmp_path)
        assert names(tmp_path) == ["step-000002"]
    manager.save(3, STATE, blocking=True)
    assert names(tmp_path) == ["step-000003"]


def test_a_disk_that_fails_is_damage(tmp_path, monkeypatch, caplog):
    """Then `fallback` takes the checkpoint before, which may lie elsewhere on the disk."""
    manager = saved(tmp_path, STATE, 1, 2)
    preadv = os.preadv

    def failing(descriptor: int, *arguments: Any) -> int:
        if "step-000002" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", failing)
    restored = manager.restore(STATE, fallback=True)
    (warned,) = caplog.messages
    aside = r"it is kept as \S+/step-000002.damaged, and \S+/step-000001 was restored"
    assert re.match(r"skipped a damaged checkpoint: restoring .*: \S+__0_0.distcp cannot be read .*; " + aside, warned)
    assert restored is not None and restored.step == 1
    assert "__0_0.distcp cannot be read from byte 0 on: Input/output error" in restored.damaged[0]


def calls_of(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> list[str]:
    """The system calls on files, in order, without the tokens and process ids in file names."""
    seen: list[str] = []

    def name(path: Any) -> str:
        path = Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else Path(path)
        return re.sub(r"(?<=\.)([0-9a-f]{12}|\d+)\.(?=[a-z])", "", path.name)

    def noted(call: str) -> Callable[..., Any]:
        original = getattr(os, call)

        def wrapper(path: Any, *rest: Any, **options: Any) -> Any:
            seen.append(" ".join([call, name(path), *(name(one) for one in rest[:1] if call == "rename")]))
            return original(path, *rest, **options)

        return wrapper

    opened = io.open

    def written(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if not isinstance(path, int) and set(mode) & set("wxa+"):
            seen.append(f"write {name(path)}")
        return opened(path, mode, *rest, **options)

    with monkeypatch.context() as patch:
        for call in ("rename", "unlink", "rmdir", "fsync"):
            patch.setattr(os, call, noted(call))
        patch.setattr(io, "open", written)
        patch.setattr(builtins, "open", written)
        action()
    return seen


def test_a_save_in_order(tmp_path, monkeypatch):
    """Each step of a save is on disk before the next one depends on it, wherever the machine is switched off.

    A checkpoint of this step is there, and an older one is to go.
    """
    saved(tmp_path, STATE, 1, 2, 3, keep=2)
    manager = CheckpointManager(tmp_path, keep=1)
    seen = calls_of(monkeypatch, lambda: manager.save(3, STATE, blocking=True))
    removals = [number for number, one in enumerate(seen) if one.split()[0] in ("unlink", "rmdir")]
    kept = [one for one in seen if one.split()[0] not in ("unlink", "rmdir")]
    here = tmp_path.name
    assert kept == [
        "fsync __0_0.distcp",
        "write part-0.json.tmp",
        "rename part-0.json.tmp part-0.json",
        "fsync .metadata",
        "fsync manifest.json",
        "fsync .step-000003.incomplete",
        "rename step-000003 .step-000003.replaced",
        "rename .step-000003.incomplete step-000003",
        f"fsync {here}",
        "rename .step-000003.replaced .step-000003.deleted",
        f"fsync {here}",
        "rename step-000002 .step-000002.deleted",
        f"fsync {here}",
    ]
    assert seen.index("unlink part-0.json") == removals[0] == seen.index("fsync manifest.json") - 1
    synced = [number for number, one in enumerate(seen) if one == f"fsync {here}"]
    assert min(number for number in removals[1:]) > synced[1], "no file goes before its checkpoint has lost its name"
    assert seen.index("rmdir .step-000002.deleted") > synced[2] > seen.index("rmdir .step-000003.deleted")
    assert names(tmp_path) == ["step-000003"]


@pytest.mark.parametrize(
    ("arguments", "files", "named"),
    [
        (["reshard", "--ranks=2"], [".metadata", "__0_0.distcp", "__1_0.distcp"], ["rename x.partial x"]),
        (["export"], ["model.safetensors"], ["rename x.partial x"]),
        (["export", "--to=torch"], ["checkpoint.pt"], ["rename checkpoint.pt x", "rmdir x.partial"]),
    ],
    ids=str,
)
def test_what_is_written_offline_is_on_disk_before_it_has_its_name(
    tmp_path, monkeypatch, arguments: list[str], files: list[str], named: list[str]
):
    saved(tmp_path, STATE, 1)
    command = [arguments[0], str(tmp_path), str(tmp_path / "x"), *arguments[1:]]
    seen = [one for one in calls_of(monkeypatch, lambda: main(command)) if not one.startswith("write ")]
    synced = seen.index("fsync x.partial")
    assert {f"fsync {one}" for one in files} <= set(seen[:synced])
    assert seen[synced + 1 :] == ["unlink journal.jsonl", *named, f"fsync {tmp_path.name}"]


def test_a_forked_worker_holds_no_lock(tmp_path):
    """A loader's worker that was forked during a save has the descriptor too, and outlives the writer."""
    hidden = tmp_path / ".step-000001.ab.incomplete"
    with writing_in(hidden):
        remove_unless_written(hidden, tmp_path / "doomed")
        assert hidden.exists()
        worker = os.fork()
        if worker == 0:
            signal.pause()
    try:
        remove_unless_written(hidden, tmp_path / "doomed")
        assert list(tmp_path.iterdir()) == []
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_what_was_found_damaged_keeps_nothing_from_its_place(tmp_path, monkeypatch):
    """A second damaged checkpoint of one step gets another name, which is on disk before the run goes on."""
    manager = saved(tmp_path, STATE, 1)
    for aside in ("step-000002.damaged", "step-000002.damaged1"):
        manager.save(2, STATE, blocking=True)
        flip(tmp_path / "step-000002" / "__0_0.distcp")
        seen = calls_of(monkeypatch, lambda: manager.restore(STATE, fallback=True))
        assert seen == [f"rename step-000002 {aside}", f"fsync {tmp_path.name}"]
        assert (tmp_path / aside / "manifest.json").exists()


def test_a_file_that_is_short_is_found_before_anything_is_filled_in(tmp_path):
    """The sizes of all files are checked first, so the state stays unchanged, even the values in undamaged files."""
    model = torch.nn.Linear(4, 2)
    saved(tmp_path / "one", TrainingState(model), 1)
    assert main(["reshard", str(tmp_path / "one"), str(tmp_path / "two" / "step-000001"), "--ranks", "2"]) == 0
    torch.nn.init.zeros_(model.weight)
    data = tmp_path / "two" / "step-000001" / "__1_0.distcp"
    for size in (data.stat().st_size - 1, data.stat().st_size + 1):
        os.truncate(data, size)
        for source in (None, data.parent):
            with pytest.raises(DamagedCheckpointError, match=rf"__1_0.distcp has {size} bytes, \d+ were written"):
                CheckpointManager(tmp_path / "two").restore(TrainingState(model), source=source)
            assert not model.weight.any()
    data.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"__1_0\.distcp is missing"):
        CheckpointManager(tmp_path / "two").restore(TrainingState(model))
    assert not model.weight.any()


def test_a_checkpoint_under_another_name_is_none(tmp_path):
    """It was renamed by hand, or has another checkpoint's files: the run would go on from the wrong step."""
    manager = saved(tmp_path, STATE, 1, 2)
    (tmp_path / "step-000002").rename(tmp_path / "step-000003")
    (tmp_path / "step-000009").symlink_to(tmp_path / "step-000001")
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is of step 1: renamed, or swapped"):
        manager.restore(STATE)
    (tmp_path / "step-000009").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is of step 2: renamed, or swapped"):
        manager.restore(STATE)
    restored = manager.restore(STATE, fallback=True)
    assert restored is not None and restored.step == 1


def test_a_checkpoint_that_was_moved_and_linked(tmp_path):
    """It counts, also while its disk is not there, and only the link is removed when newer ones replace it."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    saved(run, STATE, 1)
    (run / "step-000001").rename(moved)
    (run / "step-000001").symlink_to(moved)
    manager = CheckpointManager(run, keep=1)
    restored = manager.restore(STATE)
    assert restored is not None and restored.step == 1
    moved.rename(tmp_path / "away")
    with pytest.raises(DamagedCheckpointError, match=r"step-000001/manifest\.json is missing"):
        manager.restore(STATE)
    (run / "step-000002").symlink_to(tmp_path / "nowhere")
    (run / ".step-000001.ab.replaced").symlink_to(moved)  # of a run that died
    (tmp_path / "away").rename(moved)
    manager = CheckpointManager(run, keep=1)
    manager.save(2, STATE, blocking=True)
    assert [path.name for path in run.iterdir()] == ["step-000002"] and (moved / "manifest.json").exists()


@pytest.mark.parametrize("step", [1, 2, 3])
@on_ranks(2)
def test_the_second_to_save_is_refused(rank: int, world_size: int, tmp_path, step: int) -> None:
    """All ranks of the second run hear of it, whether its step is older than the first one's, the same or newer."""
    saved(tmp_path, STATE, 1)
    elder, younger = CheckpointManager(tmp_path, keep=1), CheckpointManager(tmp_path, keep=1)
    elder.save(2, STATE, blocking=True)
    text = (
        f"^saving step {step} to {tmp_path} failed on rank 0: {tmp_path} gained step-000002 since this run began, and "
        "this run has not saved it: another run saves to the same"
    )
    for _ in range(2):
        with pytest.raises(CheckpointError, match=text):
            younger.save(step, STATE, blocking=True)
        dist.barrier()
        assert names(tmp_path) == ["step-000002"]
    dist.barrier()
    elder.save(3, STATE, blocking=True)
    dist.barrier()
    assert names(tmp_path) == ["step-000003"]


def test_one_that_took_the_place_of_ours(tmp_path):
    first = saved(tmp_path, STATE, 1)
    saved(tmp_path, STATE, 1)  # of the same step: replaced
    with pytest.raises(CheckpointError, match="gained step-000001 since this run began"):
        first.save(2, STATE, blocking=True)


def test_who_only_looks_and_who_starts_again_is_let_alone(tmp_path):
    (tmp_path / ".step-000009.ab.incomplete").mkdir()  # of a run that died
    for number in range(1, 4):
        run = CheckpointManager(tmp_path, keep=2)
        for step in (2 * number, 2 * number + 1, 2 * number):  # forth and back
            run.save(step, STATE, blocking=True)
            assert CheckpointManager(tmp_path).restore(STATE).step == run.checkpoints()[-1].step
    shutil.rmtree(tmp_path / "step-000006")  # by hand
    run.save(8, STATE, blocking=True)


@pytest.mark.parametrize("how", ["cut off", "missing", "a pipe"])
def test_a_manifest_that_is_damaged_ends_no_run(tmp_path, how: str):
    run = saved(tmp_path, STATE, 1)
    manifest = tmp_path / "step-000001" / "manifest.json"
    if how == "cut off":
        os.truncate(manifest, 50)
    else:
        manifest.unlink()
    if how == "a pipe":
        os.mkfifo(manifest)
    run.save(2, STATE, blocking=True)
    assert run.restore(STATE).step == 2
