"""The pool itself: results, seeds, errors of every rank, hangs with stacks, deaths, warnings, and starting over."""

import functools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import RankError, RankFailure, RankTimeout, on_ranks, pool, run_ranks
from tests.support.waiting import await_file


def whoami(rank: int, world_size: int, *args: object) -> tuple[object, ...]:
    return (rank, world_size, os.getpid(), *args)


def fail_on(rank: int, world_size: int, failing: tuple[int, ...], reported: Path) -> None:
    """Ranks fail one after the other, the highest one first."""
    print(f"about to look at rank {rank}")
    if rank in failing:
        value = rank + 10
        for higher in (one for one in failing if one > rank):
            await_file(reported / str(higher), f"rank {higher} reports its failure")
        assert value == -1
    dist.barrier()


def hang_on(rank: int, world_size: int, hanging: int) -> None:
    if rank == hanging:
        ThreadPoolExecutor(1).submit(the_place_where_it_hangs).result()


def the_place_where_it_hangs() -> None:
    time.sleep(1000)


def die_on(rank: int, world_size: int, dying: int) -> None:
    if rank == dying:
        os.abort()
    dist.barrier()


def spoil(rank: int, world_size: int) -> None:
    os.environ["SPOILT"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def is_spoilt(rank: int, world_size: int) -> bool:
    return "SPOILT" in os.environ or torch.zeros(1).dtype != torch.float32 or not torch.is_grad_enabled()


@on_ranks(2)
def no_test(rank: int, world_size: int, failing: int) -> None:
    assert rank != failing


def pids(world_size: int) -> list[int]:
    return [result[2] for result in run_ranks(world_size, whoami)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_in_rank_order(world_size: int) -> None:
    results = run_ranks(world_size, functools.partial(whoami), "a", 1)
    assert [(r, w, *rest) for r, w, _, *rest in results] == [(r, world_size, "a", 1) for r in range(world_size)]
    assert len({pid for _, _, pid, *_ in results} | {os.getpid()}) == world_size + 1


def test_every_failing_rank_is_reported_first_failure_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pids(3)
    receive = pool._Pool._receive

    def receive_and_tell(self: pool._Pool, rank: int) -> object:
        reply = receive(self, rank)
        if isinstance(reply, RankError):
            (tmp_path / str(rank)).touch()
        return reply

    monkeypatch.setattr(pool._Pool, "_receive", receive_and_tell)
    with pytest.raises(RankFailure) as caught:
        run_ranks(3, fail_on, (1, 2), tmp_path)
    failure = caught.value
    assert [(error.rank, error.type_name) for error in failure.errors] == [(2, "AssertionError"), (1, "AssertionError")]
    assert "assert 12 == -1" in failure.errors[0].message, "asserts in bodies are explained"
    assert "in fail_on" in failure.errors[0].traceback
    assert "about to look at rank 2" in failure.errors[0].output
    assert "barrier" in failure.stacks[0], "the rank that waits for the others is shown too"
    text = str(failure)
    assert text.startswith("tests.support.test_pool.fail_on failed on rank 2, 1 of 3")
    assert text.index("rank 2: AssertionError") < text.index("rank 1: AssertionError") < text.index("rank 0: still")
    after = pids(3)
    assert not set(before) & set(after), "the pool has started over"


def test_hang_shows_the_stacks_of_all_ranks_and_starts_over() -> None:
    before = pids(2)
    with pytest.raises(RankTimeout, match=r"rank 1 of 2 did not return within 2 s") as caught:
        run_ranks(2, hang_on, 1, timeout=2)
    assert caught.value.hung == [1]
    assert "in hang_on" in caught.value.stacks[1] and "in the_place_where_it_hangs" in caught.value.stacks[1]
    assert 0 in caught.value.stacks
    assert not set(before) & set(pids(2))


def test_death_of_a_rank() -> None:
    with pytest.raises(RankFailure, match="rank 1: died: exit code -6") as caught:
        run_ranks(2, die_on, 1)
    died = next(error for error in caught.value.errors if error.rank == 1)
    assert "die_on" in died.output, "faulthandler's stack of the fatal signal is part of the report"
    assert len(pids(2)) == 2


@pytest.mark.parametrize("more", ["a", "b"])
@on_ranks(1, 3)
def test_a_test_may_run_on_ranks(rank: int, world_size: int, more: str) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    assert more in "ab"


def test_a_test_on_ranks_fails_if_it_fails_on_one() -> None:
    no_test(failing=2)
    with pytest.raises(RankFailure, match=r"test_pool\.no_test failed on rank 1 of 2"):
        no_test(failing=1)


def test_process_state_is_put_back() -> None:
    run_ranks(2, spoil)
    assert run_ranks(2, is_spoilt) == [False, False]


def test_isolated_call_has_processes_of_its_own() -> None:
    before = pids(2)
    alone = [result[2] for result in run_ranks(2, whoami, isolated=True)]
    assert not set(alone) & set(before)
    assert pids(2) == before
