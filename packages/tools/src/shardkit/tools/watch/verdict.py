"""From what the ranks said to who is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shardkit.tools.watch.statement import Started, Statement, WaitingFor

__all__ = ["verdict"]

_OUTSIDE = {"other": "outside of forward, backward and optimizer"}
# Lines of these say how a rank waits, not what for.
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python3", "/shardkit/", "<frozen")


def verdict(statements: Mapping[int, Statement], silent: Mapping[int, str]) -> str:
    """The report of an alarm.

    Args:
        statements: what ranks said, by rank.
        silent: what can be seen of the ranks that said nothing.
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
        if said is not None and said.stack:
            lines.append(f"    {_place_in_code(said)}")
    return "\n".join(lines)


def _longest_wait(statements: Mapping[int, Statement]) -> tuple[int, WaitingFor] | None:
    """The wait to explain: of a collective rather than anything else, of most ranks, and then the longest."""
    waits = [(rank, said.waiting) for rank, said in statements.items() if said.waiting is not None]
    shared = Counter(_what(wait) for _, wait in waits)
    return max(waits, key=lambda one: (one[1].number >= 0, shared[_what(one[1])], one[1].seconds), default=None)


def _what(wait: WaitingFor) -> tuple[str, str, str, tuple[int, ...], int]:
    return wait.kind, wait.fqn, wait.group, tuple(wait.ranks), wait.number


def _about_wait(
    rank: int, wait: WaitingFor, statements: Mapping[int, Statement], silent: Mapping[int, str]
) -> list[str]:
    said = statements[rank]
    which = f"{wait.kind} of '{wait.fqn}'" if wait.number >= 0 else f"{wait.operation} of '{wait.fqn}'"
    group = f", group {wait.ranks}" if wait.ranks else ""
    lines = [f"rank {rank} has waited {wait.seconds:.0f} s for {which} ({said.phase}, step {said.step}{group})"]
    members = wait.ranks or sorted([*statements, *silent])
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
    same = (one for one in said.started if (one.kind, one.group, one.ranks) == (wait.kind, wait.group, wait.ranks))
    started = next(same, None)
    count = started.count if started is not None else 0
    if count <= wait.number:
        return f"it has not started this {wait.kind}; it is {_whereabouts(said)}"
    label = started.label(wait.number) if started is not None else None
    if label is not None and label != wait.fqn:
        return f"it took another branch: its {wait.kind} in this place was of '{label}'; it is {_whereabouts(said)}"
    return None


def _first_differences(statements: Mapping[int, Statement]) -> list[str]:
    """Where ranks began to run different collectives on the same group, if what they remember reaches back so far.

    Two ranks that meet in different groups of one size may exchange their bytes without noticing, and hang later.
    """
    lines = []
    everywhere = [(rank, started) for rank, said in statements.items() for started in said.started]
    for which in dict.fromkeys(_where_of(started) for _, started in everywhere):
        ranks = {rank: one for rank, one in everywhere if _where_of(one) == which}
        for number in range(
            max(one.count - len(one.last) for one in ranks.values()), min(o.count for o in ranks.values())
        ):
            labels = {rank: one.label(number) for rank, one in ranks.items()}
            if len(set(labels.values())) > 1:
                told = ", ".join(f"rank {rank} of '{label}'" for rank, label in labels.items())
                lines.append(f"  the ranks took different branches: {which[0]} number {number} was on {told}")
                break
    return lines


def _where_of(started: Started) -> tuple[str, str, tuple[int, ...]]:
    return started.kind, started.group, tuple(started.ranks)


def _whereabouts(said: Statement) -> str:
    inside = not said.module.startswith("(")
    where = f"in {said.phase} of '{said.module}'" if inside else _OUTSIDE.get(said.phase, f"in {said.phase}")
    where += f", step {said.step}"
    if said.waiting is not None:
        where += f", waiting for {said.waiting.operation} of '{said.waiting.fqn}' since {said.waiting.seconds:.0f} s"
    if said.failure is not None:
        where += f", failing: {said.failure}"
    return where


def _place_in_code(said: Statement) -> str:
    """The innermost line that is of no library, else the innermost of all."""
    own = [frame for frame in said.stack if not any(part in frame for part in _LIBRARIES)]
    return f"at {(own or said.stack)[-1]}"
