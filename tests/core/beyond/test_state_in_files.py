"""Optimizer state in files: the bits of state in memory, within the bytes that may be resident, and nothing left."""

import copy
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.core import fully_shard
from shardkit.core.beyond import FileTier, overlap_step, steps
from shardkit.core.checkpoint import CheckpointManager
from tests.core.checkpoint.trainee import ElasticLoader, Trainee, differences
from tests.core.optimizer_steps.placed_training import assert_same
from tests.support import on_ranks, rank_mesh, run_ranks

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
            for module in (*model, model):
                fully_shard(module, mesh=rank_mesh((world_size,)))
            self.models.append(model)
            self.optimizers.append(getattr(torch.optim, name)(model.parameters(), **({"lr": 0.01} | options)))
        overlap_step(self.optimizers[0], states=tier)

    def step(self, seed: int) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def check(self, where: str) -> None:
        assert_same(*(dict(model.state_dict()) for model in self.models), where)
        assert_same(*(optimizer.state_dict() for optimizer in self.optimizers), where)


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

    steps.Job.run = measured  # type: ignore[method-assign]
    try:
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
    finally:
        steps.Job.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("world_size", "name", "options", "parameters"),
    [
        (1, "AdamW", {"fused": True}, False),
        (1, "Adam", {"foreach": False}, True),
        (2, "Adam", {"foreach": False}, False),
        (2, "AdamW", {"fused": True}, True),
    ],
    ids=str,
)
def test_state_of_four_times_what_may_be_resident(
    tmp_path: Path, world_size: int, name: str, options: dict[str, Any], parameters: bool
) -> None:
    run_ranks(world_size, _train, tmp_path, name, options, parameters)


def _save(rank: int, world_size: int, path: Path) -> Any:
    trainee = Trainee((world_size,), seed=1, loader_kind=ElasticLoader)
    overlap_step(trainee.optimizer, states=FileTier(path / "tier", "4kB"))
    trainee.train(2)
    with CheckpointManager(path / "saved") as manager:
        manager.save(2, trainee.state)
    return trainee.full()


def _restore(rank: int, world_size: int, path: Path, in_files: bool) -> Any:
    trainee = Trainee((world_size,), seed=2, loader_kind=ElasticLoader)
    if in_files:
        overlap_step(trainee.optimizer, states=FileTier(path / "tier", "64 KiB"))
    trainee.train(1)
    assert CheckpointManager(path / "saved").restore(trainee.state) is not None
    seen = trainee.full()
    trainee.train(1)
    return seen


def test_resumes_on_other_ranks_with_and_without_files(tmp_path: Path) -> None:
    expected, _ = run_ranks(2, _save, tmp_path)
    for world_size, in_files in ((3, False), (1, True)):
        for seen in run_ranks(world_size, _restore, tmp_path, in_files):
            assert differences(seen, expected) == []


def _full_disk(rank: int, world_size: int, path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    runs = Runs(world_size, FileTier(path, "1GiB"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, most))
    runs.step(0)
    with pytest.raises(RuntimeError, match=rf"step of '0\.weight' failed: .*{path} has no room for \d+ bytes .*'0\."):
        runs.models[0].state_dict()
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    runs.check("a full disk")  # nothing is lost: the state is in memory
    assert list(path.iterdir()) == []


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    run_ranks(1, _full_disk, tmp_path, isolated=True)


@on_ranks(1)
def test_too_little_that_may_be_resident(rank: int, world_size: int, tmp_path: Path) -> None:
    runs = Runs(world_size, FileTier(tmp_path, "100 KiB"))
    runs.step(0)
    with pytest.raises(
        RuntimeError, match=r"takes 526336 bytes, and resident=102400; raise resident, or shard smaller"
    ):
        runs.models[0][0].weight.to_local()


@pytest.mark.parametrize("wrong", [0, "much", "-1GiB", "3 apples", ""])
def test_bytes_that_are_none(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a number of bytes; give one above 0"):
        FileTier(tmp_path, wrong)
