"""All ranks of one system, started together and asked together."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from side_by_side.link import Side
from side_by_side.rank import Assignment, Failure, serve

_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.profiler",
    "shardkit.core",
    "side_by_side.rank",
]
_PATIENCE = 400.0


class CrewFailure(RuntimeError):
    """A rank of a system raised, died, or did not answer in time."""


class Crew:
    """Fresh processes, one for each rank. Use `started` to make one and to have it ended.

    `sides`: the two ends of a link; the first half of the ranks is put at the one, the others at the other.
    """

    def __init__(
        self,
        system: str,
        workload: str,
        optimizer: str,
        world_size: int,
        device: str,
        sides: tuple[Side, Side] | None = None,
    ) -> None:
        self.system = system
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="compare-")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        store = str(Path(self._directory.name) / "store")
        context = _context(device)
        for rank in range(world_size):
            here, there = context.Pipe()
            side = sides[2 * rank // world_size] if sides else None
            assignment = Assignment(system, workload, optimizer, rank, world_size, device, store, side)
            process = context.Process(target=serve, args=(assignment, there), name=f"{system}-{rank}", daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def ready(self) -> None:
        """Wait until every rank has built its network."""
        self._answers()

    def ask(self, request: str, *args: Any) -> list[Any]:
        """Have every rank run the `Trainer` method `request`; the answers in rank order.

        Raises `CrewFailure` with the ranks' tracebacks.
        """
        for connection in self._connections:
            connection.send((request, args))
        return self._answers()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        self._directory.cleanup()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _PATIENCE
        while len(answers) < self.world_size:
            waiting = {self._connections[rank]: rank for rank in range(self.world_size) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise CrewFailure(
                    f"{self.system}: no answer from ranks {sorted(waiting.values())} in {_PATIENCE:.0f} s"
                )
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(self.world_size)]

    def _answer(self, rank: int) -> Any:
        try:
            answer = self._connections[rank].recv()
        except EOFError:
            raise CrewFailure(f"{self.system}: rank {rank} died") from None
        if isinstance(answer, Failure):
            raise CrewFailure(f"{self.system}: rank {rank} raised\n{answer.text}")
        return answer


@contextmanager
def started(systems: Sequence[str], *args: Any) -> Iterator[list[Crew]]:
    """A crew for each system, with its network built; ended with the block. `args` are the other ones of `Crew`."""
    crews: list[Crew] = []
    try:
        for system in systems:
            crews.append(Crew(system, *args))
        for crew in crews:
            crew.ready()
        yield crews
    finally:
        for crew in crews:
            crew.close()


def _context(device: str) -> Any:
    # Read when torch loads; with more threads the ranks would fight for the cores.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    # Forked from a process that has only imported torch: as fresh as spawned ones, without importing it each time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context
