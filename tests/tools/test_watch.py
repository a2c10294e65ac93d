"""Hangs of real processes: the missing ranks are named, in whatever way they stopped.

The ranks are started by hand rather than by torchrun, which ends all of them when one has died; and by the server that
the pools of ranks use, which has imported torch already.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import start_server
from tests.support.rank_process import end_with_the_server
from tests.tools import small_job
from tests.tools.installed import environment

pytest.importorskip("msgspec")

LIMIT = 1.0
_PATIENCE = 60.0


def _rank(variables: dict[str, str], path: list[str], output: str, trouble: str) -> None:
    """One rank's process."""
    end_with_the_server()
    os.environ.update(variables)
    sys.path[:] = path
    with open(output, "ab") as file:  # noqa: PTH123 (appending, from several processes)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    small_job.main(trouble)


class Ranks:
    """The processes of a job. All of them write to one file."""

    def __init__(self, directory: Path, world_size: int, trouble: str, **variables: str) -> None:
        start_server()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.output = directory / "output"
        self.output.touch()
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        variables |= {"SHARDKIT_WATCH": "1", "SHARDKIT_WATCH_SECONDS": str(LIMIT)}
        found = environment(directory / "metadata", **variables)
        path = found["PYTHONPATH"].split(os.pathsep)
        context = multiprocessing.get_context("forkserver")
        self.processes: list[Any] = [
            context.Process(target=_rank, args=(found | {"RANK": str(rank)}, path, str(self.output), trouble))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

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

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def ranks(world_size: int, trouble: str, **variables: str) -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory(prefix="watch-") as directory:
        job = Ranks(Path(directory), world_size, trouble, **variables)
        try:
            yield job
        finally:
            job.end()


def test_a_stopped_rank_is_named() -> None:
    with ranks(3, "stop") as job:
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
def test_a_rank_that_has_died_is_named(shared: str, trouble: str) -> None:
    """While others wait for it, or before they send it anything."""
    with ranks(2, trouble, SHARDKIT_SHARED_MEMORY=shared) as job:
        text = job.said("there:", "where every rank is:", "failing: blocks.0: ")
        assert f"missing: rank 1: process {job.processes[1].pid} on {socket.gethostname()} has ended" in text
        assert job.exit_codes() == [1, -signal.SIGKILL], "the error itself is not swallowed"


def test_a_rank_that_waits_elsewhere_is_named_with_its_line() -> None:
    with ranks(2, "elsewhere") as job:
        text = job.said("there:", "in wait_elsewhere")
        assert "missing: rank 1: it has not started this all-gather; it is outside of forward, backward" in text
        assert f"{small_job.__file__}:" in text


@pytest.mark.daily(shared=["1"])
@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_rank_that_took_another_branch_is_named(shared: str) -> None:
    with ranks(2, "branch", SHARDKIT_SHARED_MEMORY=shared) as job:
        text = job.said("there:", "the ranks took different branches: all-gather number")
        assert "missing: rank" in text
        line = next(line for line in text.splitlines() if "different branches: all-gather" in line)
        # Block 1 was left out by rank 1: in backward it came to block 0 one gather early.
        assert line.endswith("was on rank 0 of 'blocks.1', rank 1 of 'blocks.0'")


def test_a_job_without_trouble_is_left_alone() -> None:
    with ranks(2, "") as job:
        assert job.exit_codes() == [0, 0]
        assert "shardkit watch" not in job.output.read_text()
