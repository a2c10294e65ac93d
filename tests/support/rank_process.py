"""One rank: a process that joins the pool's gloo group once and then runs bodies until its connection closes.

The main thread runs bodies. A second thread reads the connection, so that a rank that hangs in a collective still
notices the end of the pytest process, and leaves. A stopped rank ends with the server that it was forked from, which
notices the same. SIGUSR1 writes all stacks to a file, even from within a hang.
"""

import ctypes
import faulthandler
import gc
import itertools
import multiprocessing.forkserver
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.support.failures import RankError
from tests.support.gloo import use_one_thread_a_group

# Far beyond any test's timeout: a hang is the pool's to report, with stacks, not gloo's.
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# Whose files a rank can write.
_USER = os.getuid()
# See prctl(2).
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankPlace:
    """Where a rank belongs: its pool's directory holds the store, the stack dumps and the captured output."""

    rank: int
    world_size: int
    directory: Path
    sys_path: tuple[str, ...]

    @property
    def stacks_file(self) -> Path:
        return self.directory / f"stacks-{self.rank}"

    @property
    def stacks_end_file(self) -> Path:
        """Not empty once the stacks have been written."""
        return self.directory / f"stacks-end-{self.rank}"

    @property
    def output_file(self) -> Path:
        return self.directory / f"output-{self.rank}"


@dataclass(frozen=True)
class Job:
    """A body to run. ``call`` is the pickle of (function, args), opened on the rank so that its failure is reported."""

    call: bytes
    seed: int
    is_last: bool  # of this process


@dataclass(frozen=True)
class RankWarning:
    """A warning raised on a rank, in a form that the pytest process can raise again."""

    category: type[Warning]
    text: str
    filename: str
    lineno: int


@dataclass(frozen=True)
class Outcome:
    """How a job ended on one rank. ``result`` is a pickle; exactly one of the first three fields is set."""

    result: bytes | None = None
    error: RankError | None = None
    skipped: str | None = None
    warnings: tuple[RankWarning, ...] = ()


@dataclass(frozen=True)
class Clean:
    """Ask for (and answer) the tidying between two jobs. ``process_groups`` counts those the rank now holds."""

    process_groups: int = 0


def serve(place: RankPlace, connection: Connection) -> None:
    """Entry point of a rank process. Returns never: the process ends when the other end of ``connection`` closes."""
    _prepare_process(place)
    if place.rank and (measuring := _measuring()):  # which doubles a rank's time; the first tells nearly all
        measuring.stop()
    requests: queue.SimpleQueue[Job | Clean] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(connection, requests), daemon=True).start()
    store = dist.FileStore(str(place.directory / "store"), place.world_size)
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=_COLLECTIVE_TIMEOUT
    )
    _collect_garbage(all_of_it=False)
    environment = dict(os.environ)
    for count in itertools.count():
        request = requests.get()
        if isinstance(request, Job):
            reply: Outcome | Clean = _run(request, place)
        else:
            reply = _clean(environment, all_garbage=count % 100 == 99)
        sys.stdout.flush()
        sys.stderr.flush()
        if place.rank == 0 and (isinstance(request, Clean) or request.is_last or reply.error):
            _save_coverage()  # after the last job, and after an error, nothing is cleaned
        connection.send_bytes(pickle.dumps(reply))


def _measuring() -> Any:
    """The object that measures coverage in this process, None if there is none."""
    coverage = sys.modules.get("coverage")
    return coverage and coverage.Coverage.current()


def _save_coverage() -> None:
    """If coverage is measured: save it now, because pools end by SIGKILL.

    A body that has become another user, as some tests of permissions do, can no longer save it.
    """
    if os.getuid() == _USER and (measuring := _measuring()):
        measuring.save()


def _prepare_process(place: RankPlace) -> None:
    end_with_the_server()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group; pytest decides
    sys.path[:] = place.sys_path
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    output = place.output_file.open("ab", buffering=0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr, all_threads=True)
    # After it has written the stacks, faulthandler calls the handler before it, which writes a byte to the wakeup
    # descriptor, in C and at once, so also in a hang.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(os.open(place.stacks_end_file, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC))
    faulthandler.register(signal.SIGUSR1, file=place.stacks_file.open("w"), all_threads=True, chain=True)
    torch.set_num_threads(1)
    use_one_thread_a_group()


def end_with_the_server() -> None:
    """Lets this process, which the server has forked, end with it, also while it is stopped.

    The server lives while a process holds its descriptor, so it is closed here. If a process group has lost its parent
    and has stopped processes, all of it gets SIGHUP: these are not in pytest's.
    """
    os.setpgid(0, 0)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")
    server = multiprocessing.forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None


def rewrite_assertions() -> None:
    """Give asserts in bodies pytest's explanations. Best effort: without it a bare assert says less, and no more."""
    try:
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config())
    except Exception as error:  # noqa: BLE001 (these are pytest's internals, which may change)
        print(f"assertions in bodies are not rewritten: {error!r}", file=sys.stderr)


def _read_requests(connection: Connection, requests: "queue.SimpleQueue[Job | Clean]") -> None:
    while True:
        try:
            requests.put(pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)


def _run(job: Job, place: RankPlace) -> Outcome:
    _seed(job.seed)
    error = skipped = result = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            body, args = pickle.loads(job.call)
            result = pickle.dumps(_call(body, place, args))
        except BaseException as exception:  # noqa: BLE001 (all of it is reported)
            if type(exception).__name__ == "Skipped":
                skipped = str(exception)
            else:
                error = _describe(exception, place.rank)
    return Outcome(result=result, error=error, skipped=skipped, warnings=_portable(caught))


def _call(body: Callable[..., Any], place: RankPlace, args: tuple[Any, ...]) -> Any:
    body = getattr(body, "on_a_rank", body)  # a test is found by the name that it has in its module
    return body(place.rank, place.world_size, *args)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _describe(exception: BaseException, rank: int) -> RankError:
    frames = exception.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # a report starts with the body
    text = "".join(traceback.format_exception(type(exception), exception, frames))
    return RankError(rank, type(exception).__qualname__, str(exception), text, time.time())


def _portable(caught: list[warnings.WarningMessage]) -> tuple[RankWarning, ...]:
    """Drop repeats, and replace categories that the pytest process could not import by their nearest builtin base."""
    kept: dict[RankWarning, None] = {}
    for message in caught:
        category = next(kind for kind in message.category.__mro__ if kind.__module__ in ("builtins", "pytest"))
        kept[RankWarning(category, str(message.message), message.filename, message.lineno)] = None
    return tuple(kept)


def _clean(environment: dict[str, str], *, all_garbage: bool) -> Clean:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    _collect_garbage(all_of_it=all_garbage)
    dist.barrier()
    return Clean(process_groups=len(c10d._world.pg_map))


def _collect_garbage(*, all_of_it: bool) -> None:
    """Collect the garbage of the last body. Survivors of a collection (torch, above all) are not visited each time."""
    if all_of_it:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
