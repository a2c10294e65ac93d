"""Hangs of real processes, whose missing ranks are named in whatever way they stopped; and the verdict by itself.

The ranks are started by hand rather than by torchrun, which ends all of them when one has died; and by the server that
the pools of ranks use, which has imported torch already.
"""

import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardkit.tools.report.schema import PlaceOfRank
from shardkit.tools.watch.verdict import Kind, Process, Started, Statement, WaitingFor, verdict
from tests.support.pool import start_server
from tests.support.ports import free_ports
from tests.support.rank_process import end_with_the_server
from tests.tools import small_job

pytest.importorskip("msgspec")

LIMIT = 1.0
_PATIENCE = 60.0


def _rank(variables: dict[str, str], output: str, trouble: str) -> None:
    """One rank's process."""
    end_with_the_server()
    os.environ.update(variables)
    with open(output, "ab") as file:  # noqa: PTH123 (appending, from several processes)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    small_job.main(trouble)


class Ranks:
    """The processes of a job, which end with the context. All of them write to one file."""

    def __init__(self, directory: Path, world_size: int, trouble: str, **variables: str) -> None:
        start_server()
        self.output = directory / "output"
        self.output.touch()
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(*free_ports(1)), "WORLD_SIZE": str(world_size)}
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "SHARDKIT_WATCH": "1", "SHARDKIT_WATCH_SECONDS": str(LIMIT)}
        context = multiprocessing.get_context("forkserver")
        self.processes: list[Any] = [
            context.Process(target=_rank, args=(variables | {"RANK": str(rank)}, str(self.output), trouble))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def said(self, *words: str) -> str:
        """The output, once all words are in it."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            text = self.output.read_text()
            if all(word in text for word in words):
                return text
            assert time.monotonic() < deadline, f"{words} is not in:\n{text}"
            time.sleep(0.1)

    def exit_codes(self) -> list[int | None]:
        """The exit codes of the processes, once all have ended."""
        for process in self.processes:
            process.join(_PATIENCE)
        return [process.exitcode for process in self.processes]


def test_a_stopped_rank_is_named(tmp_path) -> None:
    with Ranks(tmp_path, 3, "stop") as job:
        text = job.said("for all-gather of 'blocks.0' (forward, step 2, group [0, 1, 2])", "there:")
        stopped = job.processes[2].pid
        assert f"missing: rank 2: process {stopped} on {socket.gethostname()} is stopped (SIGSTOP" in text
        assert "  there: rank 0, rank 1" in text
        # The rank goes on, and so does the job: nothing that was watched is worse for it.
        os.kill(stopped, signal.SIGCONT)
        assert job.exit_codes() == [0, 0, 0]


@pytest.mark.daily(shared=["0"])
@pytest.mark.parametrize("trouble", ["kill", "kill before"])
@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_rank_that_has_died_is_named(shared: str, trouble: str, tmp_path) -> None:
    """While others wait for it, or before they send it anything."""
    with Ranks(tmp_path, 2, trouble, SHARDKIT_SHARED_MEMORY=shared) as job:
        text = job.said("there:", "where every rank is:", "failing: blocks.0: ")
        assert f"missing: rank 1: process {job.processes[1].pid} on {socket.gethostname()} has ended" in text
        assert job.exit_codes() == [1, -signal.SIGKILL], "the error itself is not swallowed"


def test_a_rank_that_waits_elsewhere_is_named_with_its_line(tmp_path) -> None:
    with Ranks(tmp_path, 2, "elsewhere") as job:
        text = job.said("there:", "in wait_elsewhere")
        assert "missing: rank 1: it has not started this all-gather; it is outside of forward, backward" in text
        assert f"{small_job.__file__}:" in text


@pytest.mark.daily(shared=["1"])
@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_rank_that_took_another_branch_is_named(shared: str, tmp_path) -> None:
    with Ranks(tmp_path, 2, "branch", SHARDKIT_SHARED_MEMORY=shared) as job:
        text = job.said("there:", "the ranks took different branches: all-gather number")
        assert "missing: rank" in text
        line = next(line for line in text.splitlines() if "different branches: all-gather" in line)
        # Block 1 was left out by rank 1: in backward it came to block 0 one gather early.
        assert line.endswith("was on rank 0 of 'blocks.1', rank 1 of 'blocks.0'")


def test_a_job_without_trouble_is_left_alone(tmp_path) -> None:
    with Ranks(tmp_path, 2, "") as job:
        assert job.exit_codes() == [0, 0]
        assert "shardkit watch" not in job.output.read_text()


GROUP = (0, 1, 2)


def started(*labels: str, count: int | None = None, group: str = "1") -> Started:
    return Started(Kind("all-gather", group, GROUP), len(labels) if count is None else count, list(labels))


def said(rank: int, waiting: WaitingFor | None, *began: Started, stack: tuple[str, ...] = ()) -> Statement:
    return Statement(rank, 4, "forward", "blocks.1", waiting, list(began), list(stack), None)


def wait(fqn: str = "blocks.1", number: int = 1, seconds: float = 7.0) -> WaitingFor:
    return WaitingFor("all-gather", fqn, Kind("all-gather", "1", GROUP), number, seconds)


HERE = started("blocks.0", "blocks.1")


def test_who_has_not_started_and_who_says_nothing_is_missing() -> None:
    text = verdict({0: said(0, wait(), HERE), 1: said(1, None, started("blocks.0"))}, {2: "process 5 has ended"})
    assert text.splitlines()[:4] == [
        "rank 0 has waited 7 s for all-gather of 'blocks.1' (forward, step 4, group [0, 1, 2])",
        "  missing: rank 1: it has not started this all-gather; it is in forward of 'blocks.1', step 4",
        "  missing: rank 2: process 5 has ended",
        "  there: rank 0",
    ]


def test_the_majority_is_where_all_should_be() -> None:
    other = said(2, wait("blocks.9", seconds=100.0), started("blocks.0", "blocks.9"))
    text = verdict({0: said(0, wait(), HERE), 1: said(1, wait(), HERE), 2: other}, {})
    assert "for all-gather of 'blocks.1'" in text.splitlines()[0]
    assert "missing: rank 2: it took another branch: its all-gather in this place was of 'blocks.9'" in text
    assert "  there: rank 0, rank 1" in text
    assert "different branches: all-gather number 1 was on rank 0 of 'blocks.1', rank 1 of 'blocks.1', rank 2" in text


def test_groups_over_the_same_ranks_are_told_apart() -> None:
    """Two models with a mesh each: one rank is late in the second model, and nobody took another branch."""
    teacher = started("teacher", "teacher", group="2")
    late = started("teacher", group="2")
    text = verdict({0: said(0, wait(), teacher, HERE), 1: said(1, None, late, started("blocks.0"))}, {})
    assert "missing: rank 1: it has not started this all-gather" in text
    assert "branch" not in text
    text = verdict({0: said(0, wait(), HERE, teacher), 1: said(1, None, late, HERE)}, {2: "process 5 has ended"})
    assert "  there: rank 0, rank 1" in text
    assert "branch" not in text


def test_set_up_is_waited_for_by_all() -> None:
    meeting = WaitingFor("set-up", "Net", Kind("set-up"), -1, 3.0)
    text = verdict({0: said(0, meeting), 1: said(1, None)}, {})
    assert "rank 0 has waited 3 s for set-up of 'Net'" in text
    assert "missing: rank 1: it is elsewhere" in text


def test_statements_travel_as_text_and_places_tell_the_condition_of_a_process() -> None:
    one = said(0, wait(), HERE, stack=("a",))
    assert msgspec.json.decode(msgspec.json.encode(one), type=Statement) == one
    here = Process.own()
    assert "is alive, but does not answer" in here.condition()
    assert "has ended" in Process(here.place, "0").condition()
    assert "cannot be reached" in Process(PlaceOfRank("elsewhere", "another boot", 1), "1").condition()
