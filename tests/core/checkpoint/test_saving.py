"""`saving.py`: saves that fail, on one rank or on all."""

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.core.checkpoint import CheckpointError, CheckpointManager, DamagedCheckpointError, TrainingState, saving
from shardkit.core.checkpoint.directory import CheckpointDirectory
from shardkit.core.checkpoint.index import seal, unseal
from shardkit.core.checkpoint.plan import Piece, Plan
from shardkit.core.checkpoint.saving import Header, Image, Part, build_index, chunks_after, read_part, write_part
from tests.core.checkpoint.trainee import Held
from tests.support import on_ranks


@on_ranks(2)
def test_all_ranks_give_the_same_directory(rank: int, world_size: int, tmp_path) -> None:
    """Otherwise the first rank would wait half an hour for files that the others write elsewhere."""
    text = f"failed on rank 1: directory {tmp_path / '1'}, but rank 0 has {tmp_path / '0'}"
    with pytest.raises(CheckpointError, match=text):
        CheckpointManager(tmp_path / str(rank))


def test_parts_that_never_come(tmp_path):
    """A rank that writes to another disk."""
    image = Image([], pinned=False)
    directory = CheckpointDirectory(tmp_path)
    save = saving.Save(directory, "ab", Header(1, 3, {}), 0, Plan(), image, None, 0.2)
    save.start()
    assert save.await_part() is None
    text = r"ranks \[1, 2\] have not written their part where this rank sees it: they had 0.2 s; the directory must be"
    assert re.search(text, str(save.await_commit()))
    assert list(tmp_path.iterdir()) == [] and save.progress.phase == "failed"


def part_of(*told: Piece) -> Part:
    _, end = chunks_after(0, "", told)
    return Part(end, ("0" * 32,) * bool(end), told, (), ())


def test_notes_that_are_damaged_are_none(tmp_path):
    """One note is damaged, and one was written by another program."""
    write_part(tmp_path, 0, [b"zero"], Plan(), lambda _: None)
    note = tmp_path / "part-0.json"
    document = unseal(note.read_bytes(), "note")
    note.write_bytes(note.read_bytes().replace(b'"nbytes":4', b'"nbytes":5'))
    with pytest.raises(DamagedCheckpointError, match=r"part-0\.json is damaged: its seal does not fit"):
        read_part(tmp_path, 0)
    for change in ({"nbytes": []}, {"nbytes": "x"}, {"told": [[["w"], "float33", [], [], []]]}, {"objects": 3}):
        note.write_bytes(seal({**document, **change}))
        with pytest.raises(DamagedCheckpointError, match=r"part-0\.json is not put together as a note of a rank"):
            read_part(tmp_path, 0)


def test_parts_that_do_not_fit_make_no_checkpoint():
    """A rank's reported length must match its file, and ranks must agree on shared tensors."""
    one, other = (Piece(("w",), torch.float32, shape, (0,), shape) for shape in ((2,), (3,)))
    with pytest.raises(CheckpointError, match="rank 0 wrote 5 bytes, but its tensors and objects take 0 and 5: the"):
        build_index(Header(1, 1, {}), [], [Part(5, ("0" * 32,), (), (), ())])
    with pytest.raises(CheckpointError, match=r"w: rank 1 has \(3,\) of torch.float32, another rank \(2,\) of torch"):
        build_index(Header(1, 2, {}), [], [part_of(one), part_of(other)])
    index = build_index(Header(1, 3, {}), [], [part_of(), part_of(one), part_of(one)])
    assert [chunk.file for chunk in index.tensors["w"].chunks] == ["__1_0.distcp"]
    assert list(index.files) == ["__1_0.distcp", "__2_0.distcp"], "rank 0 had nothing to write, and no file"


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def ended(*arguments: Any) -> None:
    raise SystemExit


@pytest.mark.parametrize(
    ("place", "failing", "text"),
    [
        ("threading.Thread.start", no_thread, "RuntimeError: can't start new thread"),
        ("shardkit.core.checkpoint.saving.write_part", ended, "the thread that writes was ended by SystemExit()"),
    ],
)
@on_ranks(2)
def test_a_writer_that_dies_is_reported_everywhere(
    rank: int, world_size: int, tmp_path, place: str, failing: Any, text: str
) -> None:
    """It cannot begin where the number of threads is limited; or it ends with an exception that is not an Exception."""
    manager = CheckpointManager(tmp_path)
    state = TrainingState(torch.nn.Linear(1, 1))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(place, failing)
        manager.save(1, state)
        with pytest.raises(CheckpointError) as failed:
            manager.wait()
    assert str(failed.value) == f"saving step 1 to {tmp_path} failed on rank 1: {text}"
    manager.save(2, state, blocking=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


SCRIPT = """
import sys, threading, torch
from shardkit.core.checkpoint import CheckpointManager, TrainingState, saving
write = saving.write_part
def last(*arguments):
    training = threading.main_thread()
    training.join(30)
    assert not training.is_alive(), "the script does not end before the save is on disk"
    write(*arguments)
saving.write_part = last
CheckpointManager(sys.argv[1]).save(1, TrainingState(torch.nn.Linear(1, 1)))
"""

ALONE = """
import sys, torch
from pathlib import Path
from shardkit.core.checkpoint import saving
from shardkit.core.checkpoint.saving import Header, Image
from shardkit.core.checkpoint.directory import CheckpointDirectory
from shardkit.core.checkpoint.plan import Plan
saving._GRACE_SECONDS = 0.3
directory, image = CheckpointDirectory(Path(sys.argv[1])), Image([], pinned=False)
saving.Save(directory, "ab", Header(1, 2, {}), 0, Plan(), image, None, 600.0).start()
"""


def run_script(text: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", text, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def test_a_script_that_ends_with_a_save_on_its_way(tmp_path):
    """The script does not wait for the save, but the checkpoint is complete when the process has ended."""
    run_script(SCRIPT, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_script_that_ends_does_not_wait_for_ranks_that_are_gone(tmp_path):
    done = run_script(ALONE, tmp_path)
    assert "ranks [1] have not written their part" in done.stderr and "the training ended 0.3 s ago" in done.stderr
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_a_save_waits_for_the_one_before(rank: int, world_size: int, tmp_path) -> None:
    """The first save is written once the second one waits: staging memory is the first one's until then."""
    own = Held({"values": torch.full((3000,), float(rank))})
    state = TrainingState(torch.nn.Linear(1, 1), per_rank={"own": own})
    write_part, await_part = saving.write_part, saving.Save.await_part
    waits = threading.Event()

    def later(*arguments: Any) -> None:
        assert waits.wait(30), "nothing waits for the first save"
        write_part(*arguments)

    def wait_and_tell(save: saving.Save) -> Exception | None:
        waits.set()
        return await_part(save)

    with pytest.MonkeyPatch.context() as patch, CheckpointManager(tmp_path) as manager:
        patch.setattr(saving, "write_part", later)
        patch.setattr(saving.Save, "await_part", wait_and_tell)
        for step in (1, 2):
            manager.save(step, state)
            own.state["values"] += 10
        manager.wait()
    for step in (1, 2):
        manager.restore(state, step=step)
        assert own.state["values"].unique().tolist() == [rank + 10 * (step - 1)]
