"""`manager.py`, `saving.py`: state comes back on the same ranks and on others; saves that cannot be, and that fail."""

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.core import fully_shard
from shardkit.core.checkpoint import CheckpointError, CheckpointManager, DamagedCheckpointError, TrainingState, saving
from shardkit.core.checkpoint.directory import CheckpointDirectory
from shardkit.core.checkpoint.index import seal, unseal
from shardkit.core.checkpoint.plan import Piece, Plan
from shardkit.core.checkpoint.saving import Header, Image, Part, build_index, chunks_after, read_part, write_part
from tests.core.checkpoint.trainee import ElasticLoader, Held, Loader, Trainee, local, save_trained, saved
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.twins import differences


@pytest.mark.parametrize(("world_size", "shape"), [(1, (1,)), (2, (2,)), (3, (3,)), (4, (2, 2))], ids=str)
@on_ranks(seed_per_rank=True)
def test_a_resumed_run_is_the_same_to_the_last_bit(
    rank: int, world_size: int, tmp_path, shape: tuple[int, ...]
) -> None:
    """Three steps, a save, two steps; and another run that restores and takes the same two."""
    straight = Trainee(shape, seed=1)
    straight.train(3)
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, straight.state, info={"note": [1, "two"]})
        straight.train(2)  # while the writer is at work
    expected, expected_own = straight.full(), straight.own()

    other = Trainee(shape, seed=2)
    other.train(1)
    restored = CheckpointManager(tmp_path).restore(other.state)
    assert restored is not None
    assert (restored.step, restored.info, restored.world_size) == (3, {"note": [1, "two"]}, world_size)
    other.train(2)
    found = differences(other.full(), expected) + differences(other.own(), expected_own, "own")
    assert found + differences(other.losses[1:], straight.losses[3:], "losses") == []


def restore_elsewhere(rank: int, world_size: int, path: Path, again: Path, shape: tuple[int, ...]) -> Any:
    """After a refusal: where a loader takes its own rank's position only, those of other ranks are not guessed."""
    separately = rf"'loader' was saved separately by \d ranks?, and there are {world_size} now.*load_state_dicts"
    with pytest.raises(CheckpointError, match=separately):
        CheckpointManager(path).restore(Trainee(shape, loader_kind=Loader).state)
    trainee = Trainee(shape, seed=2, loader_kind=ElasticLoader)
    trainee.train(1)
    assert CheckpointManager(path).restore(trainee.state) is not None
    seen, position = trainee.full(), trainee.loader.position
    with CheckpointManager(again) as manager:
        manager.save(2, trainee.state)
    trainee.train(1)  # training goes on after a restore
    return seen, position


def test_any_ranks_to_any_ranks(tmp_path):
    """2x2 -> 3 -> 1 -> 4 -> 2: uneven shards, empty shards, replicas."""
    saved = run_ranks(4, save_trained, tmp_path / "0", (2, 2), 2)
    expected, positions = zip(*(states[0] for states in saved), strict=True)
    total = sum(positions)
    for number, shape in enumerate([(3,), (1,), (4,), (2,)]):
        world_size = shape[0]
        for seen, position in run_ranks(
            world_size, restore_elsewhere, tmp_path / str(number), tmp_path / str(number + 1), shape
        ):
            assert differences(seen, expected[0]) == []
            assert position == total
        total *= world_size


@pytest.mark.parametrize("saved", ["ab", "a", ""])
@on_ranks(2)
def test_an_optimizer_that_has_stepped_in_part(rank: int, world_size: int, tmp_path, saved: str) -> None:
    """Torch's helpers lose state here, or raise; ours give what was saved, and leave gradients."""

    def branches(stepped: str, backward: str) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(len(stepped))
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "ab"})
        for module in model.values():
            fully_shard(module, mesh=rank_mesh((world_size,)))
        optimizer = torch.optim.AdamW(model.parameters())
        for name in stepped:
            model[name](torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name in backward:
            model[name](torch.ones(2, 4)).sum().backward()
        return model, optimizer

    model, optimizer = branches(saved, backward="a")
    manager = CheckpointManager(tmp_path)
    manager.save(1, TrainingState(model, optimizer), blocking=True)
    for stepped, backward in (("", ""), ("", "a"), ("a", ""), ("b", "b"), ("ab", "ab")):
        other, into = branches(stepped, backward)
        manager.restore(TrainingState(other, into))
        for name, parameter in other.named_parameters():
            expected = optimizer.state.get(model.get_parameter(name), {})
            found = into.state.get(parameter, {})
            assert set(found) == set(expected), (stepped, name)
            assert all(torch.equal(local(found[key]), local(expected[key])) for key in expected)
            assert (parameter.grad is not None) == (name[0] in backward)


@on_ranks(2)
def test_retention_listing_and_progress(rank: int, world_size: int, tmp_path) -> None:
    trainee = Trainee((world_size,))
    with CheckpointManager(tmp_path, keep=2, every=2) as manager:
        assert manager.restore(trainee.state) is None
        for step in range(1, 8):
            trainee.train(1)
            assert manager.due(step) == (step in (2, 4, 6))
            if manager.due(step):
                manager.save(step, trainee.state)
        progress = manager.progress
        assert progress is not None and progress.step == 6 and progress.total_bytes > 0
        manager.wait()
        assert manager.progress is None
        manager.save(6, trainee.state, info={"again": True}, blocking=True)  # one of this step is there
        assert [one.step for one in manager.checkpoints()] == [4, 6]
        assert manager.restore(trainee.state).info == {"again": True}
        assert manager.restore(trainee.state, step=4).step == 4
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 5, only of \[4, 6\]"):
            manager.restore(trainee.state, step=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000006"]
    names = sorted(path.name for path in (tmp_path / "step-000006").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]


@on_ranks(2)
def test_what_cannot_be_saved_is_refused_on_all_ranks(rank: int, world_size: int, tmp_path) -> None:
    model, manager = Trainee((world_size,)).model, CheckpointManager(tmp_path)

    def refused(text: str, step: int = 1, value: Any = 1, **options: Any) -> None:
        state = TrainingState(model, user={"odd": Held({"below": {"value": value}})})
        with pytest.raises(CheckpointError, match=re.escape(text)):
            manager.save(step, state, **options)

    for value, text in (
        (object(), "saving step 1 failed on rank 0: TypeError: odd.below.value: a builtins.object in the state"),
        (torch.eye(2).to_sparse(), "odd.below.value: a tensor of layout torch.sparse_coo"),
        ({(1, 2): 3}, "odd.below.value: the key (1, 2) is a tuple"),
    ):
        refused(text, value=1 if rank else value)  # only one rank cannot; the others hear of it
    refused("ranks save different steps, 1 to 2", step=1 + rank)
    refused("is not JSON serializable", info={"path": tmp_path})
    manager.save(1, TrainingState(model), blocking=True)  # and the manager still works
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@on_ranks(2)
def test_a_write_that_fails_is_reported_everywhere_and_leaves_nothing(rank: int, world_size: int, tmp_path) -> None:
    trainee, no_space = Trainee((world_size,)), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    manager = saved(tmp_path, trainee.state, 1)
    for victim in range(world_size):
        failed = f"saving step 2 to {tmp_path} failed on rank {victim}: No space left on device"
        with pytest.MonkeyPatch.context() as patch:
            if rank == victim:
                patch.setattr(os, "fsync", mock.Mock(side_effect=no_space))
            manager.save(2, trainee.state)
            with pytest.raises(CheckpointError, match=failed):
                manager.save(3, trainee.state)
        assert [one.step for one in manager.checkpoints()] == [1]
        dist.barrier()
        assert [one.name for one in tmp_path.iterdir()] == ["step-000001"], "the partial checkpoint was not removed"
    manager.save(3, trainee.state, blocking=True)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]


@on_ranks(2)
def test_another_model_is_refused_and_left_as_it_was(rank: int, world_size: int, tmp_path) -> None:
    manager = saved(tmp_path, Trainee((world_size,)).state, 1)
    for name, buffer, text in (
        ("seen", torch.zeros(4, dtype=torch.int64), r"model.seen: .*has shape \(3,\) and torch.int64, expected \(4,\)"),
        ("later", torch.zeros(1), "does not fit the model: it lacks model.later"),
        ("seen", None, r"does not fit the model: it has beside it model\.seen; build"),
        ("seen", torch.zeros(3), r"expected \(3,\) and torch.float32"),
    ):
        other = Trainee((world_size,))
        other.model.register_buffer(name, buffer)
        before = other.full()
        with pytest.raises(CheckpointError, match=text) as refused:
            manager.restore(other.state)
        assert not isinstance(refused.value, DamagedCheckpointError)
        assert differences(other.full(), before) == []


@pytest.mark.parametrize("given", [{"keep": 0}, *({"every": every} for every in (0, "3", 2.0, True))], ids=str)
def test_bad_arguments(tmp_path, given: dict[str, Any]):
    [(name, value)] = given.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}, expected a whole number from 1 on; pass None"):
        CheckpointManager(tmp_path, **given)


MODEL = nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"user": {"rng": Loader(0)}}, ValueError, "user has the key 'rng', expected a name without dots"),
        ({"user": {"a": Loader(0)}, "per_rank": {"a": Loader(0)}}, ValueError, "per_rank has the key 'a', expected"),
        ({"user": {3: Loader(0)}}, ValueError, "user has the key 3, expected"),
        ({"user": Loader(0)}, TypeError, "user is a Loader, expected a mapping of names to objects with state_dict"),
        ({"user": {"step": 3}}, TypeError, r"user\['step'\] is a int without state_dict and load_state_dict; pass"),
        ({"per_rank": {"own": {"position": 1}}}, TypeError, r"per_rank\['own'\] is a dict without"),
        ({"scheduler": 0.1}, TypeError, "scheduler is a float without"),
        ({"optimizer": MODEL.parameters()}, TypeError, "optimizer 0 is a Parameter, expected an Optimizer; pass"),
        ({"optimizer": [torch.optim.SGD(MODEL.parameters()), MODEL]}, TypeError, "optimizer 1 is a Linear, expected"),
        ({"optimizer": 0.1}, TypeError, "optimizer is a float, expected an Optimizer or several; pass"),
    ],
)
def test_what_is_no_state(given: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        TrainingState(MODEL, **given)


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
from pathlib import Path
from shardkit.core.checkpoint import CheckpointManager, TrainingState, saving
from shardkit.core.checkpoint.directory import CheckpointDirectory
from shardkit.core.checkpoint.plan import Plan
from shardkit.core.checkpoint.saving import Header, Image
saving._GRACE_SECONDS = 0.3
write = saving.write_part
def last(*arguments):
    training = threading.main_thread()
    training.join(30)
    assert not training.is_alive(), "the script does not end before the save is on disk"
    write(*arguments)
saving.write_part = last
CheckpointManager(sys.argv[1]).save(1, TrainingState(torch.nn.Linear(1, 1)))
alone, image = CheckpointDirectory(Path(sys.argv[2])), Image([], pinned=False)
saving.Save(alone, "ab", Header(1, 2, {}), 0, Plan(), image, None, 600.0).start()
"""


def test_a_script_that_ends_with_saves_on_their_way(tmp_path):
    """It waits for neither; one is complete when the process has ended, the other one's second rank is gone."""
    run, alone = tmp_path / "run", tmp_path / "alone"
    alone.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(run), str(alone)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [path.name for path in run.iterdir()] == ["step-000001"]
    assert "ranks [1] have not written their part" in done.stderr and "the training ended 0.3 s ago" in done.stderr
    assert list(alone.iterdir()) == []


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
