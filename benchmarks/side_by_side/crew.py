"""All ranks of one system, started together and asked together."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from side_by_side.link import Side
from side_by_side.rank import Assignment, answer, begin

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
    """Fresh processes, one for each rank. `started` makes crews, and ends them.

    `sides`: the two ends of a link; the first half of the ranks is put at the one, the others at the other.
    """

    def __init__(
        self,
        system: str,
        workload: str,
        optimizer: str,
        world_size: int,
        device: str,
        directory: str,
        sides: tuple[Side, Side] | None = None,
    ) -> None:
        self.system = system
        context = _context(device)
        self._ranks = [ProcessPoolExecutor(1, context) for _ in range(world_size)]
        self._building: list[Future[Any]] = []
        for rank, process in enumerate(self._ranks):
            side = sides[2 * rank // world_size] if sides else None
            store = str(Path(directory, system))
            assignment = Assignment(system, workload, optimizer, rank, world_size, device, store, side)
            self._building.append(process.submit(begin, assignment))

    def ready(self) -> None:
        """Wait until every rank has built its network."""
        self._answers(self._building)

    def ask(self, request: str, *args: Any) -> list[Any]:
        """Have every rank run the `Trainer` method `request`; the answers in rank order.

        Raises `CrewFailure` with a rank's traceback.
        """
        try:
            asked = [process.submit(answer, request, *args) for process in self._ranks]
        except BrokenExecutor:
            raise CrewFailure(f"{self.system}: a rank died") from None
        return self._answers(asked)

    def close(self) -> None:
        """The processes have been killed."""
        for process in self._ranks:
            process.shutdown()

    def _answers(self, asked: list[Future[Any]]) -> list[Any]:
        done, waiting = wait(asked, _PATIENCE, FIRST_EXCEPTION)
        for future in done:
            if error := future.exception():
                told = f"{self.system}: rank {asked.index(future)} raised or died\n{error.__cause__ or repr(error)}"
                raise CrewFailure(told) from None
        if waiting:
            late = sorted(map(asked.index, waiting))
            raise CrewFailure(f"{self.system}: no answer from ranks {late} in {_PATIENCE:.0f} s")
        return [future.result() for future in asked]


@contextmanager
def started(systems: Sequence[str], *args: Any) -> Iterator[list[Crew]]:
    """A crew for each system, with its network built; ended with the block.

    `args` are `workload`, `optimizer`, `world_size`, `device` and `sides` of `Crew`.
    """
    *trained, sides = args
    crews: list[Crew] = []
    with tempfile.TemporaryDirectory(prefix="compare-") as directory:
        try:
            for system in systems:
                crews.append(Crew(system, *trained, directory, sides))
            for crew in crews:
                crew.ready()
            yield crews
        finally:
            # A rank may be in a collective that others never join.
            for process in multiprocessing.active_children():
                process.kill()
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
