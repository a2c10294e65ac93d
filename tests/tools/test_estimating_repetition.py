"""A recording of a few equal blocks, lengthened, against all of them; estimates beside one another in processes."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.tools import Policies, TrainingJob
from shardkit.tools.estimating.job import EstimateError
from shardkit.tools.estimating.repetition import lengthened, record, repetition_of
from shardkit.tools.estimating.result import Estimate, assess, estimate_job
from shardkit.tools.estimating.simulation import simulate
from shardkit.tools.estimating.workers import Workers
from shardkit.tools.machine import preset
from tests.support import on_ranks
from tests.tools.llama_shaped import LlamaShaped

BLOCKS = 22
H100 = preset("h100")


class Layered(LlamaShaped):
    """Every `period`-th layer recomputes its activations."""

    def __init__(self, period: int = 0) -> None:
        super().__init__(128, 32, 80, BLOCKS, 4, 2)
        self.period = period

    def through(self, number: int, layer: nn.Module, x: Tensor) -> Tensor:
        again = self.period and (number + 1) % self.period == 0
        return checkpoint(layer, x, use_reentrant=False) if again else layer(x)


def job(policies: Policies, model=Layered) -> TrainingJob:
    return TrainingJob(model, lambda: torch.randint(128, (2, 16)), policies=policies)


@pytest.mark.daily(axes=[{"dp_replicate": 4, "dp_shard": 16}, {"dp": 8}])
@pytest.mark.parametrize(
    ("policies", "axes"),
    [
        (Policies(), {"dp": 64}),
        (Policies(reshard_after_forward=False, param_dtype=torch.bfloat16), {"dp_replicate": 4, "dp_shard": 16}),
        (Policies(checkpoint=True, wrap=("DecoderLayer", "lm_head")), {"dp": 4096}),
        (Policies(prefetch_budget=200_000), {"dp": 8}),
    ],
)
def test_it_is_what_all_blocks_do(policies: Policies, axes: dict[str, int]):
    one = job(policies)
    full, short = simulate(one, axes, 0, H100), record(one, axes, 0, H100)
    assert short.blocks and not full.blocks  # the first has run a few blocks, the second all
    expected, found = (assess(recording, axes, 0, policies, H100) for recording in (full, short))
    assert found.to_json() == expected.to_json()
    assert found.memory.levels[-1][1] == expected.memory.levels[-1][1]
    assert max(map(sum, (sizes for _, sizes in found.memory.levels))) == found.peak.bytes
    assert sorted(found.timeline.spans) == sorted(expected.timeline.spans)


def different() -> nn.Module:
    model = Layered()
    model.layers[9].self_attn.o_proj.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = Layered()
    model.layers[3].mlp = model.layers[4].mlp
    return model


@pytest.mark.parametrize("model", [lambda: Layered(8), lambda: Layered(2), different, tied])
def test_blocks_that_differ_are_all_run(model):
    assert repetition_of(job(Policies(), model)) is None


def test_what_reaches_over_many_blocks_is_not_lengthened():
    model, ahead = lambda: Layered(), Policies(prefetch_depth=5)  # noqa: PLW0108 - a factory of its own
    recording = simulate(job(ahead, model), {"dp": 8}, 0, H100, "layers")
    assert recording.blocks and lengthened(recording, "layers", 3) is None
    assert not record(job(ahead, model), {"dp": 8}, 0, H100).blocks


def test_iterations_of_a_users_own_are_run_in_full():
    assert repetition_of(job(Policies(accumulate=2))) is None
    assert repetition_of(job(Policies())) is not None


def _job() -> TrainingJob:
    return TrainingJob(lambda: nn.Linear(8, 8), lambda: torch.zeros(2, 8))


@on_ranks(1, isolated=True)
def test_estimates_of_other_processes_are_those_of_this_one(rank: int, world_size: int) -> None:
    """In a new process: one that has run a backward with threads makes all estimates itself."""
    dist.destroy_process_group()  # estimates make their own
    os.sched_getaffinity = lambda _: {0, 1}  # in the process of this test alone
    made_here: list[int] = []

    def make(world_size: int) -> Estimate:
        made_here.append(world_size)
        return estimate_job(_job(), world_size)

    with Workers(make) as workers:
        workers.begin([2, 4, 8])
        found = [workers.estimate(size).to_json() for size in (2, 4, 8)]
    assert found == [estimate_job(_job(), size).to_json() for size in (2, 4, 8)]
    assert not made_here


def test_errors_and_what_cannot_be_sent_back_come_from_this_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    here = os.getpid()

    def make(task: str) -> Estimate:
        if task == "dies" and os.getpid() != here:
            os._exit(1)
        if task == "wrong":
            raise EstimateError(f"wrong in {os.getpid()}")
        return estimate_job(_job(), 2)

    expected = estimate_job(_job(), 2).to_json()
    with Workers(make) as workers:
        workers.begin(["wrong", "fine"])
        with pytest.raises(EstimateError, match=f"wrong in {here}"):
            workers.estimate("wrong")
        assert workers.estimate("fine").to_json() == expected
        assert workers.estimate("dies").to_json() == expected
        assert workers.estimate("fine").to_json() == expected  # with no process left
