"""Pools of rank processes: one per world size, started on first use and kept until the pytest session ends.

Ranks are forked from a server process that has imported their modules (``rank_server.py``), so a pool costs little.
Between two calls its processes are stopped: the threads of gloo wake a hundred times a second, also if nothing is sent.
A pool is *spent* once a rank has failed, hung or died: nobody knows which collectives the others still wait in.
It is then killed, and the next call starts a new one.
"""

import atexit
import contextlib
import functools
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support import rank_process
from tests.support.failures import RankError, RankFailure, RankTimeout
from tests.support.rank_process import Clean, Job, Outcome, RankPlace, serve

_START_TIMEOUT = 120.0
_CLEAN_TIMEOUT = 30.0
# How long ranks that have not failed may go on once one has: enough for the same error to arrive from each of them.
_GRACE = 2.0
# How long a rank may take to write its stacks. A stopped one writes none.
_STACKS_TIMEOUT = 10.0
# A body's process groups stay for the life of its pool. Each has sockets, and threads that wake a hundred times a
# second, so a pool is renewed in time.
_MAX_PROCESS_GROUPS = 16

_pools: dict[int, "_Pool"] = {}


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    seed: int = 0,
    seed_per_rank: bool = False,
    isolated: bool = False,
) -> list[Any]:
    """Run ``body(rank, world_size, *args)`` on every rank and return the results in rank order.

    ``isolated`` runs it on processes that have run nothing else, and that end with it.

    Raises:
        RankFailure: a rank raised or died.
        RankTimeout: a rank did not return within ``timeout`` seconds.
        TypeError: ``body`` or ``args`` cannot be pickled.
    """
    call = _pickle_call(body, args)
    if isolated:
        alone = _Pool(world_size)
        try:
            return alone.run(_name_of(body), call, timeout, seed, seed_per_rank, is_last=True)
        finally:
            alone.kill()
    pool = _pools.get(world_size) or _Pool(world_size)
    _pools[world_size] = pool
    keep = False
    try:
        pool.send_signal(signal.SIGCONT)
        results = pool.run(_name_of(body), call, timeout, seed, seed_per_rank)
        keep = pool.clean(_name_of(body))
    finally:
        if keep:
            pool.send_signal(signal.SIGSTOP)
        else:
            _pools.pop(world_size).kill()
    return results


def on_ranks(*world_sizes: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test that every rank runs: ``test_it(rank, world_size, *parameters)``.

    With several world sizes there is a case for each; with none the test is parametrized by ``world_size``.
    ``options`` are those of `run_ranks`.
    """
    import pytest

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        parameters = list(inspect.signature(body).parameters.values())[2:]

        @functools.wraps(body)
        def test(**values: Any) -> None:
            world_size = values["world_size"] if len(world_sizes) != 1 else world_sizes[0]
            run_ranks(world_size, test, *(values[one.name] for one in parameters), **options)

        size = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # The arguments that pytest is to hand over.
        test.__signature__ = inspect.Signature([size, *parameters] if len(world_sizes) != 1 else parameters)
        test.on_a_rank = body
        return pytest.mark.parametrize("world_size", world_sizes)(test) if len(world_sizes) > 1 else test

    return decorate


def start_server() -> None:
    """Start the process that ranks are forked from. Returns at once: it imports torch while pytest collects."""
    # These are read when a library loads, so they have to be in the server's environment before it imports torch.
    # The server imports from this path, wherever pytest was started.
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    # glibc fills memory with a pattern when it hands it out and takes it back: an early read finds no old parameter. It
    # does so for all but the chunks below about a kilobyte that each thread keeps for itself.
    read = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_PERTURB_": "165", "PYTHONPATH": path}
    with mock.patch.dict(os.environ, read):
        multiprocessing.set_forkserver_preload(["tests.support.rank_server"])
        multiprocessing.forkserver.ensure_running()


def close_pools() -> None:
    """Kill every rank process. Called at the end of the session and at exit; harmless when called twice."""
    while _pools:
        _pools.popitem()[1].kill()


atexit.register(close_pools)


class _Pool:
    """The rank processes of one world size and the connection to each."""

    def __init__(self, world_size: int) -> None:
        start_server()
        self.world_size = world_size
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        self.places = [RankPlace(r, world_size, self.directory, tuple(sys.path)) for r in range(world_size)]
        self._output_read = [0] * world_size
        context = multiprocessing.get_context("forkserver")
        for place in self.places:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(place, there), name=f"rank-{place.rank}-of-{world_size}")
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)
        try:
            self.clean("the start of the pool", _START_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    def run(
        self, name: str, call: bytes, timeout: float, seed: int, seed_per_rank: bool, *, is_last: bool = False
    ) -> list[Any]:
        for rank, connection in enumerate(self.connections):
            self._send(connection, Job(call, seed + rank * seed_per_rank, is_last))
        outcomes = self._collect(name, timeout)
        self._show_output()
        _warn_again(outcomes)
        for outcome in outcomes.values():
            if outcome.skipped is not None:
                import pytest

                pytest.skip(outcome.skipped)
        return [pickle.loads(outcomes[rank].result) for rank in range(self.world_size)]

    def clean(self, name: str, timeout: float = _CLEAN_TIMEOUT) -> bool:
        """Tidy every rank and meet at a barrier. Returns whether the pool may be used again."""
        for connection in self.connections:
            self._send(connection, Clean())
        replies = self._collect(f"the clean-up after {name}", timeout)
        return all(reply.process_groups <= _MAX_PROCESS_GROUPS for reply in replies.values())

    def send_signal(self, number: signal.Signals) -> None:
        """Send every rank a signal; one that has died is reported by the next call."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _send(self, connection: Connection, request: Job | Clean) -> None:
        # A dead rank is reported by _collect, with its exit code and last words.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send_bytes(pickle.dumps(request))

    def _collect(self, name: str, timeout: float) -> dict[int, Any]:
        """Wait for one reply per rank; raise if any rank failed, died or is late."""
        replies: dict[int, Any] = {}
        errors: list[RankError] = []
        deadline = time.monotonic() + timeout
        while len(replies) + len(errors) < self.world_size:
            waiting = [r for r in range(self.world_size) if r not in replies and r not in {e.rank for e in errors}]
            ready = wait([self.connections[r] for r in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in (r for r in waiting if self.connections[r] in ready):
                reply = self._receive(rank)
                if isinstance(reply, RankError):
                    errors.append(reply)
                    deadline = min(deadline, time.monotonic() + _GRACE)
                else:
                    replies[rank] = reply
        late = [r for r in range(self.world_size) if r not in replies and r not in {e.rank for e in errors}]
        if errors:
            raise RankFailure(name, self.world_size, errors, self._stacks(late))
        if late:
            raise RankTimeout(name, self.world_size, timeout, late, self._stacks(range(self.world_size)))
        return replies

    def _receive(self, rank: int) -> Outcome | Clean | RankError:
        try:
            reply = pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(timeout=10)
            code = self.processes[rank].exitcode
            return RankError(rank, "died", f"exit code {code}", "", time.time(), self._new_output(rank))
        error = getattr(reply, "error", None)
        return replace(error, output=self._new_output(rank)) if error else reply

    def _stacks(self, ranks: Any) -> dict[int, str]:
        """Ask the ranks for their stacks and read the files that they write, most recent call first."""
        ranks = [rank for rank in ranks if self.processes[rank].is_alive()]
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_TIMEOUT
        while any(self._writes_stacks(rank) for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.005)
        return {rank: _at_work(self.places[rank].stacks_file.read_text()) + self._new_output(rank) for rank in ranks}

    def _writes_stacks(self, rank: int) -> bool:
        end = self.places[rank].stacks_end_file
        return self.processes[rank].is_alive() and not (end.exists() and end.stat().st_size)

    def _new_output(self, rank: int) -> str:
        with self.places[rank].output_file.open("rb") as file:
            file.seek(self._output_read[rank])
            text = file.read()
        self._output_read[rank] += len(text)
        return text.decode(errors="replace")

    def _show_output(self) -> None:
        for rank in range(self.world_size):
            for line in self._new_output(rank).splitlines():
                print(f"[rank {rank}] {line}")


def _at_work(stacks: str) -> str:
    """Stacks without the threads that wait for a request, and without the frames that every body has below it."""
    idle = re.compile(r" in _read_requests\n|first\):\n.* in _worker\n")  # not an executor's thread with a job
    threads = (thread for thread in stacks.split("\n\n") if not idle.search(thread))
    return "\n\n".join(thread.partition(f'\n  File "{rank_process.__file__}"')[0] for thread in threads) + "\n"


def _warn_again(outcomes: dict[int, Outcome]) -> None:
    """Raise the ranks' warnings here, each once, with the ranks that raised it."""
    ranks: dict[Any, list[int]] = {}
    for rank, outcome in sorted(outcomes.items()):
        for warning in outcome.warnings:
            ranks.setdefault(warning, []).append(rank)
    for warning, where in ranks.items():
        text = f"{warning.text} [on rank {', '.join(map(str, where))}]"
        warnings.warn_explicit(text, warning.category, warning.filename, warning.lineno)


def _pickle_call(body: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((body, args))
    except Exception as error:
        raise TypeError(
            f"{_name_of(body)} and its arguments must pickle: the body has to be a module-level function, "
            f"as must every function in its arguments ({error})"
        ) from error


def _name_of(body: Callable[..., Any]) -> str:
    inner = body.func if isinstance(body, functools.partial) else body
    return f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', repr(inner))}"
