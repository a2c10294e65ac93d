"""Optimizer state in files: the bits of state in memory, within the bytes that may be resident, and nothing left."""

import contextlib
import copy
import ctypes
import gc
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.core.beyond import FileTier, overlap_step, steps
from shardkit.core.checkpoint import CheckpointError, CheckpointManager, TrainingState, saving
from tests.core.beyond.late import late
from tests.core.checkpoint.trainee import ElasticLoader, Trainee
from tests.support import RankFailure, on_ranks, rank_mesh, run_ranks
from tests.support.sharding import shard_children
from tests.support.twins import assert_equal, differences

WIDTH, LAYERS = 256, 8


def _resident(path: Path) -> int:
    """Bytes of files below a directory, deleted ones, that this process has in memory."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            counts = str(path) in line
        elif counts and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


class Runs:
    """Two models that train alike; the first one's state lies in files."""

    def __init__(self, world_size: int, tier: FileTier, name: str = "AdamW", **options: Any) -> None:
        self.models, self.optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
            shard_children(model, mesh=rank_mesh((world_size,)))
            self.models.append(model)
            self.optimizers.append(getattr(torch.optim, name)(model.parameters(), **({"lr": 0.01} | options)))
        overlap_step(self.optimizers[0], states=tier)

    def step(self, seed: int) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def check(self, where: str) -> None:
        assert_equal(*(dict(model.state_dict()) for model in self.models), where)
        assert_equal(*(optimizer.state_dict() for optimizer in self.optimizers), where)


def _train(rank: int, world_size: int, path: Path, name: str, options: dict[str, Any], parameters: bool) -> None:
    total = (2 + parameters) * 4 * (WIDTH * WIDTH + WIDTH) * LAYERS // world_size
    tier = FileTier(path, total // 4, parameters=parameters)
    seen, gathered, noted = list[int](), list[int](), list[int]()
    run = steps.Job.run

    def look(found: list[int]) -> None:
        with tier._lock:  # or a file might be counted, leave, and make room for one that is counted, too
            found.append(_resident(path))
            noted.append(sum(file.nbytes for reference in tier._in_memory if (file := reference())))

    def measured(job: steps.Job, *args: Any) -> None:
        run(job, *args)
        look(seen)

    with mock.patch.object(steps.Job, "run", measured):
        runs = Runs(world_size, tier, name, **options)
        for layer in runs.models[0] if parameters else ():
            layer.register_forward_hook(lambda *_: look(gathered))
        for number in range(4):
            runs.step(10 * number + rank)
        runs.check("four steps")
        assert len(seen) == 4 * LAYERS
        most = tier.resident + 2 * LAYERS * resource.getpagesize()
        assert max(*seen, *gathered) <= most, (seen, gathered)
        assert max(seen) > total // 8  # a part stays
        assert list(path.iterdir()) == []
        held = runs.optimizers[0].state_dict()  # with its file, which need not be resident
        runs.optimizers[0].load_state_dict(copy.deepcopy(runs.optimizers[1].state_dict()))
        runs.step(50 + rank)
        runs.check("a load and a step")
        for model in runs.models:
            model.load_state_dict({name: one.detach() * 0.5 for name, one in model.state_dict().items()})
        runs.step(60 + rank)
        runs.step(70 + rank)
        runs.check("weights alone, and two steps")
        del held
        assert max(noted) <= tier.resident, noted
        # The files from before the load are free.
        assert _resident(path) <= total + 2 * LAYERS * resource.getpagesize()


@pytest.mark.parametrize(
    ("world_size", "name", "options", "parameters"),
    [(1, "Adam", {"foreach": False}, True), (2, "AdamW", {"fused": True}, False)],
    ids=str,
)
def test_state_of_four_times_what_may_be_resident(
    tmp_path: Path, world_size: int, name: str, options: dict[str, Any], parameters: bool
) -> None:
    run_ranks(world_size, _train, tmp_path, name, options, parameters)


def _status(key: str) -> int:
    """Bytes of this process, as the system counts them."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


class Large:
    """A model whose shards take 64 MiB, and its training."""

    SHARDS = 4 * 16 * (1024 * 1024 + 1024)

    def __init__(self, tier: FileTier | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
        shard_children(self.model, mesh=rank_mesh((1,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        if tier is not None:
            overlap_step(self.optimizer, states=tier)
        self.state = TrainingState(self.model, self.optimizer, rng=False)

    def train(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            batch = torch.randn(4, 1024, generator=torch.Generator().manual_seed(number))
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.optimizer.state_dict()


@pytest.mark.daily(parameters=[True])
@pytest.mark.parametrize("parameters", [False, True], ids=["state", "state and shards"])
@on_ranks(1, isolated=True)
def test_training_and_checkpoints_take_no_more_memory(
    rank: int, world_size: int, tmp_path: Path, parameters: bool
) -> None:
    """By the resident set of the process, and with a limit on its memory that leaves no room for the states."""
    shards, slack = Large.SHARDS, Large.SHARDS // 2
    tier = FileTier(tmp_path / "tier", (2 + parameters) * shards // 4, parameters=parameters)
    in_memory = 0 if parameters else shards
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed is not kept
    ctypes.CDLL(None).mallopt(-6, 0)  # M_PERTURB: what is allocated is not filled
    Large(FileTier(tmp_path / "warm", 2 * shards)).train([0])  # code, threads and buffers
    gc.collect()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + 3 * shards, most))  # no room for the states

    def grows(most: int, run: Callable[[], Any]) -> Any:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        found = run()
        assert _status("VmHWM") - before <= most + slack, (_status("VmHWM") - before, most)
        return found

    large = grows(shards + tier.resident, lambda: Large(tier))
    grows(shards + tier.resident, lambda: large.train(range(3)))
    with CheckpointManager(tmp_path / "filed") as manager:
        grows(in_memory, lambda: manager.save(3, large.state))
        grows(0, lambda: manager.restore(large.state))
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # it counts memory that is not touched, too
        large = grows(shards + tier.resident, lambda: Large(tier))
        grows(tier.resident, lambda: manager.restore(large.state))
    grows(shards + tier.resident, lambda: large.train([3]))
    plain = Large(None)
    plain.train(range(3))
    with CheckpointManager(tmp_path / "plain") as manager:
        manager.save(3, plain.state)
    plain.train([3])
    assert_equal(dict(large.model.state_dict()), dict(plain.model.state_dict()), "model")
    assert_equal(large.optimizer.state_dict(), plain.optimizer.state_dict(), "optimizer")
    filed, kept = ((tmp_path / name / "step-000003" / "__0_0.distcp").read_bytes() for name in ("filed", "plain"))
    assert filed == kept


def _save_and_die(rank: int, world_size: int, path: Path, tier: dict[str, Any] | None) -> None:
    trainee = Trainee((world_size,), seed=1, loader_kind=ElasticLoader)
    overlap_step(trainee.optimizer, states=tier and FileTier(path / "tier", "8kB", **tier))
    trainee.train(1)
    with late(), CheckpointManager(path / "saved") as manager:
        trainee.model(torch.arange(4)).backward()
        trainee.optimizer.step()
        manager.save(2, trainee.state)  # waits for it
    torch.save(trainee.full(), path / f"expected-{rank}")
    trainee.train(1)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _restore(rank: int, world_size: int, path: Path, overlapped: bool, in_files: bool) -> Any:
    trainee = Trainee((world_size,), seed=2, loader_kind=ElasticLoader)
    if overlapped:
        overlap_step(trainee.optimizer, states=FileTier(path / "tier", "64 KiB") if in_files else None)
    with late():
        trainee.train(1)
        assert CheckpointManager(path / "saved").restore(trainee.state) is not None
        seen = trainee.full()
    trainee.train(1)
    return seen


@pytest.mark.parametrize(
    "tier", [None, {"parameters": False}, {"parameters": True}], ids=["memory", "state", "state and shards"]
)
def test_a_killed_run_resumes_on_other_ranks_with_and_without_files(
    tmp_path: Path, tier: dict[str, Any] | None
) -> None:
    with pytest.raises(RankFailure):
        run_ranks(2, _save_and_die, tmp_path, tier, isolated=True)
    assert not tier or list((tmp_path / "tier").iterdir()) == []
    expected = torch.load(tmp_path / "expected-0", weights_only=False)
    for world_size, overlapped in ((3, False), (1, True)):
        for seen in run_ranks(world_size, _restore, tmp_path, overlapped, tier is not None):
            assert differences(seen, expected) == []


@on_ranks(2)
def test_shards_move_after_a_step_of_another_optimizer(rank: int, world_size: int, tmp_path: Path) -> None:
    """The step of a former optimizer may be under way when the shards move to the files of the next one."""
    runs, gate = Runs(world_size, FileTier(tmp_path, "1GiB", parameters=True)), threading.Event()
    runs.step(rank)
    steps._worker().submit(gate.wait)
    runs.step(10 + rank)
    for number, model in enumerate(runs.models):
        runs.optimizers[number] = torch.optim.AdamW(model.parameters(), lr=0.01)
    threading.Timer(0.5, gate.set).start()
    overlap_step(runs.optimizers[0], states=FileTier(tmp_path, "1GiB", parameters=True))
    runs.step(20 + rank)
    runs.check("another optimizer")


class Interrupted(threading.Event):
    """Ctrl-C ends as many waits of the thread that saves as are left."""

    left = 0

    def wait(self, timeout: float | None = None) -> bool:
        if Interrupted.left and not threading.current_thread().name.startswith("checkpoint-"):
            Interrupted.left -= 1
            raise KeyboardInterrupt
        return super().wait(timeout)


@pytest.mark.parametrize(
    ("at", "waits", "published"),
    [("", 1, True), ("", 2, False), ("start", 0, True), ("start", 1, False), ("fill", 0, False)],
    ids=["a wait", "two waits", "the start", "the start and a wait", "before the start"],
)
@on_ranks(2)
def test_an_interrupted_save_is_whole_or_fails(
    rank: int, world_size: int, tmp_path: Path, at: str, waits: int, published: bool
) -> None:
    """Ctrl-C on one rank: `save` goes on until its part is on disk; once more, and nothing is published."""
    runs, changed = Runs(world_size, FileTier(tmp_path / "tier", "1GiB")), threading.Event()
    runs.step(rank)
    state = TrainingState(runs.models[0], runs.optimizers[0], rng=False)
    expected = copy.deepcopy(runs.optimizers[0].state_dict())
    write, start = saving.write_file, threading.Thread.start

    def write_late(*args: Any) -> Any:
        if not published:
            changed.wait()
        return write(*args)

    def start_and_raise(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "checkpoint-2":
            raise KeyboardInterrupt

    manager = CheckpointManager(tmp_path / "saved")
    manager.save(1, state, blocking=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_file", write_late)
        if rank == 1:
            patch.setattr(saving, "threading", SimpleNamespace(**(vars(threading) | {"Event": Interrupted})))
            patch.setattr(Interrupted, "left", waits)
            if at == "fill":
                patch.setattr(saving.LiveImage, "fill", mock.Mock(side_effect=KeyboardInterrupt))
            if at == "start":
                patch.setattr(threading.Thread, "start", start_and_raise)
        else:
            changed.set()
        with pytest.raises(KeyboardInterrupt) if rank == 1 else contextlib.nullcontext():
            manager.save(2, state)
        runs.step(10 + rank)
        runs.optimizers[0].state_dict()
        changed.set()
        if published:
            manager.wait()
        else:
            with pytest.raises(
                CheckpointError, match=r"rank 1.*interrupted while state in files was .*; save again|by Key"
            ):
                manager.wait()
    assert [one.step for one in manager.checkpoints()] == [1, 2][: 1 + published]
    manager.restore(state)
    assert_equal(runs.optimizers[0].state_dict(), expected, "restored")


@pytest.mark.parametrize("parameters", [False, True], ids=["state", "shards"])
@on_ranks(1, isolated=True)
def test_a_file_that_is_cut_short_is_an_error(rank: int, world_size: int, tmp_path: Path, parameters: bool) -> None:
    runs = Runs(world_size, FileTier(tmp_path, "1GiB", parameters=parameters))
    runs.step(0)
    runs.check("a step")
    model, before = runs.models[0], [one.to_local().clone() for one in runs.models[0].parameters()]
    opened = [file for file in Path("/proc/self/fd").iterdir() if file.exists()]
    files = [file for file in opened if str(file.readlink()).startswith(str(tmp_path))]
    files.sort(key=lambda file: file.stat().st_size)  # shards take half of their state
    os.truncate(files[0 if parameters else -1], 0)
    told = rf"the file in {tmp_path} with {'shards' if parameters else 'optimizer state'} of the parameter group of "
    if parameters:
        with pytest.raises(OSError, match=rf"{told}'\d' cannot be read .*; restore the last checkpoint"):
            runs.step(1)
        return
    runs.step(1)
    with pytest.raises(RuntimeError, match=rf"step of '(\d)\.weight' failed: .*{told}'\1\.weight' cannot") as error:
        model.state_dict()
    (failed,) = (one for one in range(LAYERS) if f"step of '{one}." in str(error.value))
    for index, (seen, stepped) in enumerate(zip(*(one.parameters() for one in runs.models), strict=True)):
        assert torch.equal(seen.to_local(), before[index] if index // 2 == failed else stepped.to_local())
    model.load_state_dict(runs.models[1].state_dict())
    runs.optimizers[0].load_state_dict(copy.deepcopy(runs.optimizers[1].state_dict()))
    runs.step(2)
    runs.check("a load and a step")


@on_ranks(1, isolated=True)
def test_a_full_disk_is_an_error(rank: int, world_size: int, tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    runs = Runs(world_size, FileTier(tmp_path, "1GiB"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, most))
    runs.step(0)
    full = rf"step of '0\.weight' failed: .*{tmp_path} cannot take \d+ bytes .*'0\."
    with pytest.raises(RuntimeError, match=full):
        runs.models[0].state_dict()
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    runs.check("a full disk")  # nothing is lost: the state is in memory
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_a_directory_that_vanishes(rank: int, world_size: int, tmp_path: Path) -> None:
    """Files have no names, so those that are there stay; new ones are refused, and nothing is lost."""
    path = tmp_path / str(rank)
    runs = Runs(world_size, FileTier(path, "1GiB"))
    path.rmdir()
    runs.step(rank)
    with pytest.raises(
        RuntimeError, match=rf"of '0\.weight' failed: .*{path} cannot take .*'0\.weight' \(No such file"
    ):
        runs.models[0].state_dict()
    runs.check("no directory")
    path.mkdir()
    runs.step(10 + rank)
    runs.check("a new directory")
    path.rmdir()
    runs.step(20 + rank)
    runs.check("files without a directory")


@on_ranks(1)
def test_too_little_that_may_be_resident(rank: int, world_size: int, tmp_path: Path) -> None:
    runs = Runs(world_size, FileTier(tmp_path, "100 KiB"))
    runs.step(0)
    with pytest.raises(
        RuntimeError, match=r"takes 526336 bytes, and resident=102400; raise resident, or shard smaller"
    ):
        runs.models[0][0].weight.to_local()


@pytest.mark.parametrize("path", ["/proc/self/nothing", "/dev/null/tier"])
def test_a_directory_that_cannot_hold_files(path: str) -> None:
    with pytest.raises(OSError, match=rf"{path} cannot hold files of optimizer state \(.*\); choose a directory that"):
        FileTier(path, "1GiB")


def test_a_path_is_no_tier(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    with pytest.raises(TypeError, match=r"^states is '.*'; pass a FileTier, such as"):
        overlap_step(optimizer, states=str(tmp_path))  # type: ignore[arg-type]


def test_state_stays_where_the_first_call_put_it(tmp_path: Path) -> None:
    optimizer, tier = torch.optim.AdamW([torch.zeros(2, requires_grad=True)]), FileTier(tmp_path, "1GiB")
    for first in (None, tier):
        steps = overlap_step(optimizer, states=first)
        assert overlap_step(optimizer, states=first) is overlap_step(optimizer) is steps
        with pytest.raises(ValueError, match=r"AdamW has its state in .* since the first call of overlap_step; pass"):
            overlap_step(optimizer, states=FileTier(tmp_path, "1GiB"))
        optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])


@pytest.mark.parametrize("wrong", [0, "much", "-1GiB", "3 apples", ""])
def test_bytes_that_are_none(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a number of bytes; give one above 0"):
        FileTier(tmp_path, wrong)
