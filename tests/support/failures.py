"""The errors of ``run_ranks``: every failing rank's own error, or the stacks of ranks that hang."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankError:
    """The error of one rank. ``when`` is seconds since the epoch: it tells first failures from followers."""

    rank: int
    type_name: str
    message: str
    traceback: str
    when: float
    output: str = ""

    def __str__(self) -> str:
        return "\n".join([self.headline, *filter(None, [self.traceback.rstrip(), self._printed])])

    @property
    def headline(self) -> str:
        """The rank, the type and the first line of the message; the traceback ends with all of it."""
        return f"--- rank {self.rank}: {self.type_name}: {self.message.partition(chr(10))[0]}"

    @property
    def _printed(self) -> str:
        return f"--- rank {self.rank}: printed\n{self.output.rstrip()}" if self.output else ""

    def is_like(self, other: "RankError") -> bool:
        """Tell whether two ranks failed in the same way, so that one report is enough."""
        return (self.message, self.traceback, self.output) == (other.message, other.traceback, other.output)


class RankFailure(Exception):
    """One or more ranks failed. ``errors`` holds one entry per failing rank, first failure first.

    ``stacks`` maps each rank that had not returned when the failing ones were reported to its stack dump.
    """

    def __init__(self, body_name: str, world_size: int, errors: Sequence[RankError], stacks: dict[int, str]) -> None:
        self.errors = sorted(errors, key=lambda error: error.when)
        self.stacks = stacks
        super().__init__("\n".join(self._lines(body_name, world_size)))

    def _lines(self, body_name: str, world_size: int) -> list[str]:
        failed = ", ".join(str(error.rank) for error in self.errors)
        lines = [f"{body_name} failed on rank {failed} of {world_size}"]
        for index, error in enumerate(self.errors):
            again = next((earlier for earlier in self.errors[:index] if error.is_like(earlier)), None)
            lines.append(f"{error.headline} (as on rank {again.rank})" if again else str(error))
        lines += [
            f"--- rank {rank}: still running, at\n{stack.rstrip()}" for rank, stack in sorted(self.stacks.items())
        ]
        return lines


class RankTimeout(RankFailure):
    """No rank failed but at least one did not return in time. ``stacks`` has every rank, ``hung`` those that hang."""

    def __init__(self, body_name: str, world_size: int, timeout: float, hung: Sequence[int], stacks: dict[int, str]):
        self.timeout = timeout
        self.hung = list(hung)
        super().__init__(body_name, world_size, [], stacks)

    def _lines(self, body_name: str, world_size: int) -> list[str]:
        hung = ", ".join(map(str, self.hung))
        lines = [f"{body_name}: rank {hung} of {world_size} did not return within {self.timeout:g} s"]
        for rank, stack in sorted(self.stacks.items()):
            state = "hangs" if rank in self.hung else "has returned, waits"
            lines.append(f"--- rank {rank}: {state}, at\n{stack.rstrip()}")
        return lines
