"""Estimates beside one another: the same as one after the other, and errors of the process that asked."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.tools.estimating.job import EstimateError, TrainingJob
from shardkit.tools.estimating.result import Estimate, estimate_job
from shardkit.tools.estimating.workers import Workers
from tests.support import on_ranks


def _job() -> TrainingJob:
    return TrainingJob(lambda: nn.Linear(8, 8), lambda: torch.zeros(2, 8))


@pytest.fixture
def _two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def _made_in() -> tuple[list[int], Workers[int]]:
    """The processes' ids that tasks were made in, as far as this process hears of it; and who makes them."""
    here: list[int] = []

    def make(world_size: int) -> Estimate:
        here.append(os.getpid())
        return estimate_job(_job(), world_size)

    return here, Workers(make)


@on_ranks(1, isolated=True)
def test_estimates_of_other_processes_are_those_of_this_one(rank: int, world_size: int) -> None:
    """In a new process: one that has run a backward with threads makes all estimates itself."""
    dist.destroy_process_group()  # estimates make their own
    os.sched_getaffinity = lambda _: {0, 1}  # in the process of this test alone
    here, workers = _made_in()
    with workers:
        workers.begin([2, 4, 8])
        found = [workers.estimate(size).to_json() for size in (2, 4, 8)]
    assert found == [estimate_job(_job(), size).to_json() for size in (2, 4, 8)]
    assert not here


@pytest.mark.usefixtures("_two_cores")
def test_errors_and_what_cannot_be_sent_back_come_from_this_process():
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
