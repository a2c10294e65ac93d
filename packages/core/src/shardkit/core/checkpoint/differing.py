"""State of ranks that do not hold the same modules, as with pipeline parallelism: who writes what of it.

A plain value is written by the first rank that has it. The parameter groups of an optimizer name the parameters of one
rank; a checkpoint's name those of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.leaves import At, LeafPath, Leaves
from shardkit.core.checkpoint.training_state import OPTIMIZER

__all__ = ["Group", "Holding", "holding_of", "part_of"]

_GROUPS = (OPTIMIZER, "param_groups")


@dataclass(frozen=True)
class Group:
    """A parameter group: its options as text, and its parameters."""

    options: str
    params: tuple[str, ...]


@dataclass(frozen=True)
class Holding:
    """What the others have to know of a rank's state: the paths of its plain values, and its parameter groups."""

    plain: tuple[LeafPath, ...]
    groups: tuple[Group, ...]


@dataclass
class _Merged:
    """A parameter group of the checkpoint, and the rank and the number there that it is written from."""

    options: str
    params: dict[str, None]
    rank: int
    number: int


def holding_of(leaves: Leaves) -> Holding:
    """This rank's. Not collective."""
    plain = tuple(
        path for path, value in leaves.values.items() if not isinstance(value, DTensor) and not _is_in_group(path)
    )
    return Holding(plain, tuple(_groups(leaves)))


def _is_in_group(path: LeafPath) -> bool:
    return path[:2] == _GROUPS and len(path) > 3


def _groups(leaves: Leaves) -> Iterator[Group]:
    found: dict[Any, dict[LeafPath, Any]] = {}
    for path, value in leaves.values.items():
        if _is_in_group(path):
            found.setdefault(path[2], {})[path[3:]] = value
    for below in found.values():
        params = tuple(below.pop(("params",), ()))
        yield Group(repr(below), params)


def part_of(leaves: Leaves, holdings: Sequence[Holding], rank: int) -> Leaves:
    """What this rank writes of its leaves: all DTensors, and its part of the rest. `holdings` has every rank's."""
    owner: dict[LeafPath, int] = {}
    for holder, holding in enumerate(holdings):
        for path in holding.plain:
            owner.setdefault(path, holder)
    groups = _merge(holdings)
    places = {At(one.number): (At(place), one) for place, one in enumerate(groups) if one.rank == rank}
    part = Leaves(empties=leaves.empties)
    for path, value in leaves.values.items():
        if _is_in_group(path):
            if path[2] in places:
                place, one = places[path[2]]
                part.values[(*_GROUPS, place, *path[3:])] = list(one.params) if path[3:] == ("params",) else value
        elif isinstance(value, DTensor) or owner[path] == rank:
            part.values[path] = value
    return part


def _merge(holdings: Sequence[Holding]) -> list[_Merged]:
    """The groups of all ranks: those of the same options are one, those of the same number first."""
    merged: list[_Merged] = []
    for rank, holding in enumerate(holdings):
        used: set[int] = set()
        for number, group in enumerate(holding.groups):
            places = [number, *range(len(merged))]
            fits = (p for p in places if p < len(merged) and p not in used and merged[p].options == group.options)
            place = next(fits, len(merged))
            if place == len(merged):
                merged.append(_Merged(group.options, {}, rank, number))
            merged[place].params.update(dict.fromkeys(group.params))
            used.add(place)
    return merged
