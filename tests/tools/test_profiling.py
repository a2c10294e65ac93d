"""Profiles of real runs: exact bytes and counts, over transports and world sizes."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.core import events, fully_shard, overlap_step
from shardkit.tools.doctor import diagnose
from shardkit.tools.profiling import profile
from shardkit.tools.profiling.recorder import _limits_of_control_groups
from shardkit.tools.report.schema import Rank, Report
from tests.support import networked_mesh, on_ranks, rank_mesh, run_ranks
from tests.support.sharding import shard_each

WIDTH = 12  # every world size from 1 to 4 divides it
BLOCKS = 3
BATCH = 5
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4
ROOT_BYTES = 2 * BLOCK_BYTES
STEPS = 3
MODEL_BYTES = BLOCKS * BLOCK_BYTES + ROOT_BYTES
# Each linear layer saves its input, each tanh its output, which is the next layer's input; then square its input.
ACTIVATIONS = (2 + BLOCKS) * BATCH * WIDTH * 4 + BATCH * WIDTH * 4


class Chain(nn.Module):
    """Equal blocks between two linear layers that belong to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


def sharded_chain(mesh: DeviceMesh | None = None) -> Any:
    torch.manual_seed(0)
    model = Chain()
    return shard_each(*model.blocks, model, mesh=mesh)


def backward(model: nn.Module) -> torch.Tensor:
    loss = model(torch.randn(BATCH, WIDTH)).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, micro_batches: int = 1) -> torch.Tensor:
    """One step; returns the last loss."""
    for _ in range(micro_batches):
        loss = backward(model)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def profiled(
    rank: int,
    world_size: int,
    count: int,
    *,
    depth: int = 1,
    mesh: Callable[[], DeviceMesh | None] = lambda: None,
    micro_batches: int = 1,
    before: int = 2,
    **options: Any,
) -> Report | None:
    """The report of a run of that many steps, with two before it begins so that forward's order is known."""
    model = sharded_chain(mesh())
    model.set_prefetch_depth(depth)
    optimizer = adamw(model)
    for _ in range(before):
        train(model, optimizer)
    with profile(model, optimizer, **options) as run:
        for _ in range(count):
            train(model, optimizer, micro_batches=micro_batches)
    return run.report


def report_of(world_size: int, count: int = STEPS, **options: Any) -> Report:
    reports = run_ranks(world_size, functools.partial(profiled, count=count, **options))
    assert isinstance(reports[0], Report) and len(reports[0].ranks) == world_size
    assert reports[1:] == [None] * (world_size - 1), "rank 0 alone gets the logs of all"
    return reports[0]


def per_step(rank: Rank) -> Counter[tuple[str, str, str]]:
    """How many operations a rank had in one step, which is the same in each."""
    steps = [Counter((o.kind, o.phase, o.fqn) for o in rank.operations if o.step == step.index) for step in rank.steps]
    assert all(found == steps[0] for found in steps)
    return steps[0]


ON_A_NETWORK = {"mesh": functools.partial(networked_mesh, (3,))}


@pytest.mark.parametrize(("world_size", "options"), [(2, {}), (3, ON_A_NETWORK), (4, {})])
def test_every_collective_is_there(world_size: int, options: dict[str, Any]) -> None:
    report = report_of(world_size, **options)
    blocks = [f"blocks.{index}" for index in range(BLOCKS)]
    expected = Counter(
        [("all-gather", "forward", name) for name in blocks]
        + [("all-gather", "backward", name) for name in blocks[:-1]]  # forward leaves the last one where it is
        + [("all-gather", "forward", "FSDPChain")]
        + [("reduce-scatter", "backward", name) for name in [*blocks, "FSDPChain"]]
    )
    for rank in report.ranks:
        assert per_step(rank) == expected
        assert {one.transport for one in rank.operations} == {"c10d" if options else "shared"}
        for one in rank.operations:
            assert one.bytes == (ROOT_BYTES if one.fqn == "FSDPChain" else BLOCK_BYTES)
            assert one.padding_bytes == 0
            assert rank.begin <= one.start <= one.end <= rank.end
            # Local work on received data is exposed, too, and comes after the end.
            assert 0 <= one.blocked <= one.exposed <= rank.end - rank.begin
            assert one.blocked <= one.end - rank.begin
        assert sum(step.exposed for step in rank.steps) == pytest.approx(
            sum(one.exposed for one in rank.operations) + sum(wait.seconds for wait in rank.waits)
        )
        waited = {
            one.fqn: one.waited_by for one in rank.operations if (one.kind, one.phase) == ("all-gather", "forward")
        }
        assert waited == {name: name for name in [*blocks, "FSDPChain"]}
    assert {group.ranks == list(range(world_size)) for group in report.groups} == {True}
    assert {one.count for one in report.collectives} == {STEPS}


@pytest.mark.parametrize("world_size", [1, 4])
def test_memory_is_counted_to_the_byte(world_size: int) -> None:
    report = report_of(world_size)
    rank = report.ranks[0]
    peaks = {name: max(series.values, default=0) for name, series in rank.memory.categories.items()}
    assert peaks["sharded_parameters"] == MODEL_BYTES // world_size
    assert peaks["optimizer"] == 2 * MODEL_BYTES // world_size + 4 * 2 * (BLOCKS + 2)  # and a step count each
    # One block is prefetched while another runs; the root stays. With one rank nothing is unsharded.
    assert peaks["unsharded_parameters"] == (0 if world_size == 1 else ROOT_BYTES + 2 * BLOCK_BYTES)
    assert peaks["activations"] == ACTIVATIONS
    assert rank.memory.categories["activations"].values[-1] == 0
    # After backward all sharded gradients are there.
    assert peaks["gradients"] >= MODEL_BYTES // world_size
    assert rank.memory.peak == sum(rank.memory.peak_categories.values()) > peaks["optimizer"]
    assert rank.capacity >= rank.memory.resident_peak > rank.memory.peak
    unsharded = {module.fqn: module.unsharded_peak for module in rank.modules}
    if world_size > 1:
        assert unsharded["blocks.1"] == BLOCK_BYTES
        assert unsharded["FSDPChain"] == ROOT_BYTES


@on_ranks(1, 2)
def test_gradients_that_wait_for_a_later_micro_batch_are_counted(rank: int, world_size: int) -> None:
    model = sharded_chain()
    optimizer = adamw(model)
    with profile(model, optimizer) as run:
        for _ in range(2):
            model.set_requires_gradient_sync(False)
            backward(model)
            model.set_requires_gradient_sync(True)
            train(model, optimizer)
    for one in run.report.ranks if rank == 0 else ():
        series = one.memory.categories["gradients"]
        # Between the two backwards nothing but the whole unsharded gradient is there.
        assert MODEL_BYTES in series.values
        assert max(series.values) <= MODEL_BYTES + MODEL_BYTES // world_size
        assert series.values[-1] in (0, MODEL_BYTES // world_size), "then only the sharded one"


@pytest.mark.parametrize(("depth", "hits", "misses"), [(1, 2 * STEPS, 0), (0, 0, 2 * STEPS)])
def test_prefetches_are_counted(depth: int, hits: int, misses: int) -> None:
    modules = {module.fqn: module for module in report_of(2, depth=depth).ranks[0].modules}
    assert (modules["blocks.1"].prefetch_hits, modules["blocks.1"].prefetch_misses) == (hits, misses)
    assert modules["FSDPChain"].prefetch_misses == STEPS


def test_replicas_are_brought_together_by_all_reduces_on_groups_of_their_own() -> None:
    report = report_of(4, mesh=functools.partial(rank_mesh, (2, 2), ("replicate", "shard")))
    assert sorted(group.ranks for group in report.groups) == [[0, 1], [0, 2], [1, 3], [2, 3]]
    for rank in report.ranks:
        found = per_step(rank)
        assert sum(found.values()) == 4 * BLOCKS + 2
        assert all(found["all-reduce", "backward", f"blocks.{index}"] == 1 for index in range(BLOCKS))
        reductions = [one for one in rank.operations if one.kind == "all-reduce"]
        assert {one.transport for one in reductions} == {"c10d"}
        assert {one.bytes for one in reductions if one.fqn != "FSDPChain"} == {BLOCK_BYTES // 2}
        assert all(rank.rank in report.groups[one.group].ranks for one in rank.operations)


def test_accumulation_makes_one_step() -> None:
    rank = report_of(2, micro_batches=2).ranks[0]
    assert len(rank.steps) == STEPS
    assert per_step(rank)["all-gather", "forward", "blocks.0"] == 2


@pytest.mark.parametrize(("warmup", "steps", "recorded"), [(0, 2, 2), (2, None, 3), (4, 9, 1)])
def test_only_the_wanted_steps_are_recorded(warmup: int, steps: int | None, recorded: int) -> None:
    for rank in report_of(2, 5, before=0, warmup=warmup, steps=steps).ranks:
        assert [step.index for step in rank.steps] == list(range(recorded))
        assert per_step(rank).total() == 3 * BLOCKS + 1
        # Memory that was allocated during the warm-up is still known.
        assert min(rank.memory.categories["optimizer"].values) > 0


def test_an_extent_must_make_sense() -> None:
    with pytest.raises(ValueError, match="warmup is -1; expected 0 or more"):
        profile(nn.Linear(1, 1), warmup=-1)
    with pytest.raises(ValueError, match="steps is 0; expected at least 1"):
        profile(nn.Linear(1, 1), steps=0)


@on_ranks(4)
def test_uneven_shards_and_padding_are_told(rank: int, world_size: int) -> None:
    model = fully_shard(nn.Linear(4, 5, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(model, optimizer) as run:
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        # 5 rows in chunks of 2: the last rank has none, and 8 rows are allocated.
        assert [sum(one.shard_bytes.values()) for one in run.report.ranks] == [32, 32, 16, 0]
        (gather,) = [one for one in run.report.collectives if one.kind == "all-gather"]
        assert (gather.bytes, gather.padding_bytes) == (80, 48)


@on_ranks(2)
def test_an_exception_ends_the_recording_without_waiting_for_anybody(rank: int, world_size: int) -> None:
    model, error = sharded_chain(), (KeyError, ZeroDivisionError)[rank]

    def fail() -> None:
        model(torch.randn(BATCH, WIDTH))
        raise error

    recording = profile(model)
    with pytest.raises(error), recording:
        fail()
    assert recording.report is None
    assert not events.hub.active


@on_ranks(2)
def test_a_log_that_cannot_be_read_is_told_on_every_rank(rank: int, world_size: int) -> None:
    recording = profile(sharded_chain())
    recording.__enter__()
    if rank == 1:
        recording._recorder.entries[:] = ["damaged"]
    with pytest.raises(RuntimeError, match=r"the log of rank 1 cannot be read: ValueError\("):
        recording.__exit__(None, None, None)
    assert recording.report is None


@on_ranks(2)
def test_without_an_optimizer_every_forward_is_a_step(rank: int, world_size: int) -> None:
    model = sharded_chain()
    with profile(model, activations=False) as run, torch.no_grad():
        for _ in range(3):
            model(torch.randn(BATCH, WIDTH))
    for one in run.report.ranks if rank == 0 else ():
        assert [step.backward for step in one.steps] == [0.0] * 3
        assert per_step(one).total() == BLOCKS + 1
        assert max(one.memory.categories["activations"].values, default=0) == 0


@on_ranks(2)
def test_recording_changes_no_bit_of_the_training(rank: int, world_size: int) -> None:
    losses = []
    for watched in (False, True):
        model = sharded_chain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with profile(model, optimizer) if watched else torch.enable_grad():
            losses.append([train(model, optimizer).item() for _ in range(3)])
    assert losses[0] == losses[1]


@on_ranks(2)
def test_the_state_of_every_optimizer_is_counted_from_its_first_step_on(rank: int, world_size: int) -> None:
    model = sharded_chain()
    halves = [[*model.blocks.parameters()], [*model.inp.parameters(), *model.out.parameters()]]
    optimizers = [torch.optim.AdamW(half, lr=1e-3) for half in halves]
    with profile(model, optimizers) as run:
        for _ in range(3):
            train(model, *optimizers)
    if rank == 0:
        assert run.report.run.recorded_steps == 3
        held = run.report.ranks[0].memory.categories["optimizer"].values
        assert held[-1] == 2 * MODEL_BYTES // 2 + 4 * 2 * (BLOCKS + 2)


@on_ranks(2)
def test_recording_does_not_wait_for_steps_under_the_next_forward(rank: int, world_size: int) -> None:
    model = sharded_chain()
    optimizer = adamw(model)
    steps = overlap_step(optimizer)
    with profile(model, optimizer):
        for _ in range(3):
            train(model, optimizer)
        assert len(steps._jobs) >= BLOCKS, "of the last call of `step`"


def test_a_run_that_ends_within_its_warm_up_or_runs_no_model_has_no_steps() -> None:
    for steps in (2, 0):
        report = report_of(2, steps, before=0, warmup=steps)
        assert report.run.recorded_steps == 0 and not report.ranks[0].steps
        assert report.notes[0].startswith("no whole step was recorded")
        with pytest.raises(ValueError, match="holds no whole step"):
            diagnose(report)


def test_memory_is_limited_by_every_control_group_around_the_process(tmp_path) -> None:
    job = tmp_path / "cgroup" / "slurm" / "job"
    job.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/other\n0::/slurm/job\n")
    (job / "memory.max").write_text("max\n")
    (job.parent / "memory.max").write_text("3000\n")
    (tmp_path / "cgroup" / "memory.max").write_text("9000\n")
    (tmp_path / "memory.max").write_text("1\n")  # not below the root
    assert _limits_of_control_groups(tmp_path / "cgroup", own) == [3000, 9000]
    assert _limits_of_control_groups(tmp_path / "cgroup", tmp_path / "missing") == [9000]
