"""Statements of ranks after an alarm, and the verdict on who is missing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardkit.tools.report.schema import PlaceOfRank

_PROCESS_STATES = {
    "T": "is stopped (SIGSTOP, or a shell's job control)",
    "t": "is stopped by a debugger",
    "D": "is in an uninterruptible wait, as for a disk or a file server",
    "Z": "has ended",
    "X": "has ended",
}


@dataclass(frozen=True)
class Process:
    """A rank's process. `started` distinguishes it from a later process with the same number."""

    place: PlaceOfRank
    started: str

    @staticmethod
    def own() -> Process:
        return Process(PlaceOfRank.of_this_process(), _stat(os.getpid())[1])

    def condition(self) -> str:
        """The condition of the process as visible from here."""
        who = f"process {self.place.pid} on {self.place.host}"
        if self.place.boot != PlaceOfRank.of_this_process().boot:
            return f"{who} does not answer: it has ended, is stopped, or cannot be reached"
        state, started = _stat(self.place.pid)
        if not state or started != self.started:
            return f"{who} has ended"
        return f"{who} {_PROCESS_STATES.get(state, 'is alive, but does not answer: something holds the interpreter')}"


def _stat(pid: int) -> tuple[str, str]:
    """State and start time of a process; empty if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


class Kind(NamedTuple):
    """Collectives that are counted together: of one kind, on one process group with these global ranks.

    Several groups may have the same ranks, so `group` is a name; it is empty for a wait without a collective.
    """

    kind: str
    group: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class WaitingFor:
    """The target of a rank's wait. `number` counts the collectives of its kind; it is -1 without a collective."""

    operation: str
    fqn: str
    kind: Kind
    number: int
    seconds: float


@dataclass(frozen=True)
class Started:
    """The collectives of one kind that a rank has started: how many, and the labels of the last ones."""

    kind: Kind
    count: int
    last: list[str]

    def label(self, number: int) -> str | None:
        """The label of collective `number`, None if it has not been started or is forgotten."""
        index = number - (self.count - len(self.last))
        return self.last[index] if 0 <= index < len(self.last) else None


@dataclass(frozen=True)
class Statement:
    """Where a rank is: `stack` is its main thread's frames, innermost last; `failure` is the error it is raising."""

    rank: int
    step: int
    phase: str
    module: str
    waiting: WaitingFor | None
    started: list[Started]
    stack: list[str]
    failure: str | None


_OUTSIDE = {"other": "outside of forward, backward and optimizer"}
# Lines of these files show how a rank waits, not why.
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python3", "/shardkit/", "<frozen")


def verdict(statements: Mapping[int, Statement], silent: Mapping[int, str]) -> str:
    """The report of an alarm.

    Args:
        statements: the statements of ranks, by rank.
        silent: the visible condition of the ranks without a statement.
    """
    lines = []
    wait = _longest_wait(statements)
    if wait is not None:
        lines += _about_wait(*wait, statements, silent)
    else:
        lines += [f"no rank waits for a collective; rank {rank}: {seen}" for rank, seen in silent.items()]
    lines += _first_differences(statements)
    lines.append("where every rank is:")
    everyone = sorted([*statements, *silent])
    for rank in everyone:
        said = statements.get(rank)
        lines.append(f"  rank {rank}: {_whereabouts(said) if said is not None else silent[rank]}")
        if said is not None and said.stack:  # the innermost line outside of libraries, else the innermost of all
            own = [frame for frame in said.stack if not any(part in frame for part in _LIBRARIES)]
            lines.append(f"    at {(own or said.stack)[-1]}")
    return "\n".join(lines)


def _longest_wait(statements: Mapping[int, Statement]) -> tuple[int, WaitingFor] | None:
    """The wait to explain: a collective rather than anything else, then the most ranks, then the longest."""
    waits = [(rank, said.waiting) for rank, said in statements.items() if said.waiting is not None]
    shared = Counter((wait.kind, wait.fqn, wait.number) for _, wait in waits)
    return max(
        waits,
        key=lambda one: (one[1].number >= 0, shared[one[1].kind, one[1].fqn, one[1].number], one[1].seconds),
        default=None,
    )


def _about_wait(
    rank: int, wait: WaitingFor, statements: Mapping[int, Statement], silent: Mapping[int, str]
) -> list[str]:
    said = statements[rank]
    group = f", group {list(wait.kind.ranks)}" if wait.kind.ranks else ""
    where = f"({said.phase}, step {said.step}{group})"
    lines = [f"rank {rank} has waited {wait.seconds:.0f} s for {wait.kind.kind} of '{wait.fqn}' {where}"]
    members = wait.kind.ranks or sorted([*statements, *silent])
    here = []
    for member in members:
        if member in silent:
            lines.append(f"  missing: rank {member}: {silent[member]}")
        elif member in statements and (reason := _absence(statements[member], wait)) is not None:
            lines.append(f"  missing: rank {member}: {reason}")
        else:
            here.append(member)
    return [*lines, f"  there: {', '.join(f'rank {member}' for member in here) or 'nobody'}"]


def _absence(said: Statement, wait: WaitingFor) -> str | None:
    """Why a rank is not at the collective that another one waits for; None if it is there."""
    if wait.number < 0:
        there = said.waiting is not None and said.waiting.operation == wait.operation
        return None if there else f"it is elsewhere, {_whereabouts(said)}"
    started = next((one for one in said.started if one.kind == wait.kind), Started(wait.kind, 0, []))
    kind = wait.kind.kind
    if started.count <= wait.number:
        return f"it has not started this {kind}; it is {_whereabouts(said)}"
    label = started.label(wait.number)
    if label is not None and label != wait.fqn:
        return f"it took another branch: its {kind} in this place was of '{label}'; it is {_whereabouts(said)}"
    return None


def _first_differences(statements: Mapping[int, Statement]) -> list[str]:
    """Where ranks began to run different collectives on the same group, as far as they remember.

    Two ranks that meet in different groups of one size may exchange their bytes unnoticed, and hang later.
    """
    lines = []
    everywhere = [(rank, started) for rank, said in statements.items() for started in said.started]
    for kind in dict.fromkeys(started.kind for _, started in everywhere):
        ranks = {rank: one for rank, one in everywhere if one.kind == kind}
        remembered = max(one.count - len(one.last) for one in ranks.values())
        for number in range(remembered, min(one.count for one in ranks.values())):
            labels = {rank: one.label(number) for rank, one in ranks.items()}
            if len(set(labels.values())) > 1:
                told = ", ".join(f"rank {rank} of '{label}'" for rank, label in labels.items())
                lines.append(f"  the ranks took different branches: {kind.kind} number {number} was on {told}")
                break
    return lines


def _whereabouts(said: Statement) -> str:
    inside = not said.module.startswith("(")
    where = f"in {said.phase} of '{said.module}'" if inside else _OUTSIDE.get(said.phase, f"in {said.phase}")
    where += f", step {said.step}"
    if said.waiting is not None:
        where += f", waiting for {said.waiting.operation} of '{said.waiting.fqn}' since {said.waiting.seconds:.0f} s"
    if said.failure is not None:
        where += f", failing: {said.failure}"
    return where
