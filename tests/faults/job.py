"""The job that is disturbed: a few steps of a sharded network, a save after each, resumed from the newest checkpoint.

`resume_until_done` behaves as torchrun with `--max-restarts`: when a rank has ended badly it ends the others and
starts all of them again. It saves the seconds in which Python and torch start, so that hundreds of faults can be tried;
the tests of `torchrun` itself are few.
"""

import multiprocessing
import os
import random
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardkit.core import clip_grad_norm_, optimizer_step_on_shards
from shardkit.core.checkpoint import CheckpointManager
from tests.core.checkpoint.trainee import Trainee
from tests.faults.injection import Fault, Injector
from tests.support.pool import start_server

STEPS = 5
WORLD = 2
# Only a rank that was stopped leaves the others waiting; a machine that is busy must not look like one.
_TIMEOUT_IF_STOPPED, _TIMEOUT = timedelta(seconds=3), timedelta(seconds=120)
_ATTEMPT_TIMEOUT = 300.0
_GRACE = 0.3


def rank_main(rank: int, directory: str, attempt: int, fault: Fault | None, leader: Any) -> None:
    """One rank of one attempt, in a process of its own. Ends with 0, or 1 after an error, which it notes in a file."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["SHARDKIT_DEBUG"] = "order"
    path = Path(directory)
    _join_process_group_of_system(rank, leader)
    sys.stderr = (path / f"errors-{attempt}-{rank}").open("w", buffering=1)
    store = path / f"store-{attempt}"
    injector = Injector(fault, rank, path, store)
    code = 0
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), WORLD),
            rank=rank,
            world_size=WORLD,
            timeout=_TIMEOUT_IF_STOPPED if fault is not None and fault.kind == "stop" else _TIMEOUT,
        )
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        _train(path, attempt, injector)
    except BaseException:  # noqa: BLE001 (noted, and the exit code says so)
        traceback.print_exc()
        code = 1
    (path / f"instants-{attempt}-{rank}").write_text(str(injector.seen))
    sys.stderr.flush()
    os._exit(code)  # a writer that waits for a rank that is gone is ended, as torchrun's signal would


def _join_process_group_of_system(rank: int, leader: Any) -> None:
    """All ranks in one group of processes, which a signal can reach at once."""
    if rank == 0:
        os.setpgid(0, 0)
        leader.value = os.getpid()
        return
    while not leader.value:
        time.sleep(0.001)
    os.setpgid(0, leader.value)


def _train(path: Path, attempt: int, injector: Injector) -> None:
    trainee = Trainee((WORLD,), seed=1)
    optimizer_step_on_shards(trainee.optimizer)  # a third of the time that a short job takes
    with CheckpointManager(path / "checkpoints", keep=2, every=1, timeout=_TIMEOUT.total_seconds()) as manager:
        restored = manager.restore(trainee.state)
        start = restored.step if restored is not None and restored.step is not None else 0
        injector.arm()
        for step in range(start + 1, STEPS + 1):
            _step(trainee, step, injector)
            manager.save(step, trainee.state)
    torch.save({"full": trainee.full(), "own": trainee.own()}, path / f"final-{attempt}-{dist.get_rank()}")


def _step(trainee: Trainee, step: int, injector: Injector) -> None:
    injector.instant("training")
    tokens = (torch.randint(11, (4,)) + step) % 11
    if injector.branches(step):
        trainee.model.inner(torch.zeros(1, 7)).sum().backward()
    loss = trainee.model(tokens)
    injector.instant("training")
    loss.backward()
    injector.instant("training")
    clip_grad_norm_(trainee.model.parameters(), 1.0)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    trainee.scheduler.step()
    trainee.average.update(trainee.model)
    trainee.loader.position += int(torch.randint(9, ()))
    injector.instant("training")


@dataclass(frozen=True)
class Outcome:
    """How a job went.

    Attributes:
        path: its directory.
        attempts: that it took.
        final: the ranks' last states.
        reports: the output of the ranks of failed attempts.
        instants: how many each rank had in the last attempt.
        hung: ranks that came to no end.
        struck: whether the fault has struck, or the job ended before.
    """

    path: Path
    attempts: int
    final: list[dict[str, Any]]
    reports: list[str]
    instants: list[int]
    hung: int
    struck: bool


def resume_until_done(path: Path, fault: Fault | None, attempts: int = 4) -> Outcome:
    """Run the job, and start it again after every attempt that a rank did not survive; the fault is in the first.

    Raises RuntimeError if it is not done after so many attempts.
    """
    start_server()
    path.mkdir(parents=True, exist_ok=True)
    reports: list[str] = []
    hung = 0
    for attempt in range(attempts):
        codes, late = _attempt(path, attempt, fault if attempt == 0 else None)
        hung += late
        if codes == [0] * WORLD:
            final = [torch.load(path / f"final-{attempt}-{rank}", weights_only=False) for rank in range(WORLD)]
            instants = [int((path / f"instants-{attempt}-{rank}").read_text()) for rank in range(WORLD)]
            return Outcome(path, attempt + 1, final, reports, instants, hung, (path / "struck").exists())
        for rank, code in enumerate(codes):
            file = path / f"errors-{attempt}-{rank}"
            errors = file.read_text() if file.exists() else ""
            reports.append(f"attempt {attempt}, rank {rank}, code {code}: {errors}")
    raise RuntimeError(f"{fault}: not done after {attempts} attempts:\n" + "\n".join(reports))


def _attempt(path: Path, attempt: int, fault: Fault | None) -> tuple[list[int | None], int]:
    """The ranks' exit codes, and how many were killed because no rank ended in time."""
    context = multiprocessing.get_context("forkserver")
    leader = context.Value("i", 0)
    ranks = [
        context.Process(target=rank_main, args=(rank, str(path), attempt, fault, leader), daemon=True)
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    running, patience = {process.sentinel: process for process in ranks}, _ATTEMPT_TIMEOUT
    try:
        while running and (ended := wait(list(running), patience)):
            for process in [running.pop(sentinel) for sentinel in ended]:
                process.join()
                if process.exitcode:
                    patience = _GRACE  # the others may tell why they cannot go on either
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [process.exitcode for process in ranks], len(running) if patience == _ATTEMPT_TIMEOUT else 0


def left_behind(path: Path, removal_failed: bool = False) -> list[str]:
    """Files and directories that should not be there after a job: hidden directories, notes.

    If the call that removes a renamed old checkpoint may have failed, the next run removes the checkpoint.
    """
    checkpoints = path / "checkpoints"
    hidden = list(checkpoints.glob(".*"))
    if removal_failed and hidden and all(one.name.endswith(".deleted") for one in hidden):
        CheckpointManager(checkpoints)
    names = sorted(one.name for one in checkpoints.iterdir())
    # Older ones may be there still if the fault hit their removal: the next save would see to it.
    complete = names[-2:] == [f"step-{step:06d}" for step in (STEPS - 1, STEPS)]
    found = [] if complete and all(name.startswith("step-") for name in names) else [f"in the directory: {names}"]
    for one in checkpoints.glob("step-*"):
        files = sorted(file.name for file in one.iterdir())
        if files != [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]:
            found.append(f"in {one.name}: {files}")
    return found
