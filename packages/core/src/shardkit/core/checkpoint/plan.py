"""What this rank writes of a captured state: decided on the rank alone (Note [No planning step] in `pieces.py`)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.leaves import LeafPath, check_has_values, name_of, object_bytes
from shardkit.core.checkpoint.pieces import Layout, Piece, is_described_by_layout, own_pieces
from shardkit.core.checkpoint.training_state import MODEL, OPTIMIZER, Captured
from shardkit.core.torch_compat import local_of

__all__ = ["Plan", "layouts_digest", "make_plan"]

_BY_NAME = (MODEL, OPTIMIZER)


@dataclass
class Plan:
    """This rank's part of a save.

    Attributes:
        layouts: the tensors that layouts describe, each with its number; empty if the ranks' layouts differ.
        described, told: pieces of these, and pieces that the other ranks cannot know of.
        values: the tensors of both, in that order.
        objects: bytes of values that are no tensors.
        empties: paths of empty mappings.
        order: the leaves that this rank tells of, if any object comes before a tensor.
    """

    layouts: list[tuple[int, Layout]] = field(default_factory=list)
    described: list[Piece] = field(default_factory=list)
    told: list[Piece] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    objects: list[tuple[LeafPath, bytes]] = field(default_factory=list)
    empties: list[LeafPath] = field(default_factory=list)
    order: list[LeafPath] = field(default_factory=list)


def make_plan(captured: Captured, rank: int, *, by_layout: bool) -> Plan:
    """The plan of a rank. Not collective.

    Args:
        captured: the state.
        rank: global.
        by_layout: whether all ranks have the same names and layouts. If not, as with pipeline parallelism, every rank
            tells what it writes, and the plain values in `captured` are those that are its to write (`differing.py`).

    Raises:
        TypeError, ValueError: for state that cannot be stored, by name.
    """
    plan = Plan()
    told: list[tuple[Piece, torch.Tensor]] = []
    number = 0
    for path, value in captured.shared.values.items():
        if isinstance(value, DTensor):
            check_has_values(name_of(path), local_of(value))
            known = by_layout and is_described_by_layout(value)
            # What layouts do not describe may have another number elsewhere: its writer cannot depend on that.
            pieces = own_pieces(path, value, number if known else 0)
            if known:
                plan.layouts.append((number, Layout.of(path, value)))
                plan.described += [piece for piece, _ in pieces]
                plan.values += [values for _, values in pieces]
                number += 1
            else:
                told += pieces
        elif rank == 0 or not by_layout:
            _add_plain(plan, told, path, value)
    for path, value in captured.own.values.items():
        if isinstance(value, DTensor):
            raise TypeError(f"{name_of(path)}: a DTensor in per-rank state; put it into user=, which is sharded")
        _add_plain(plan, told, path, value)
    plan.told = [piece for piece, _ in told]
    plan.values += [values for _, values in told]
    plan.order = _order(captured, shared=rank == 0 or not by_layout)
    plan.empties = [*(captured.shared.empties if rank == 0 or not by_layout else ()), *captured.own.empties]
    return plan


def _order(captured: Captured, *, shared: bool) -> list[LeafPath]:
    """Of user and per-rank state, as a run may go through the keys of a dict; tensors first goes without saying."""
    leaves = {path: value for path, value in captured.shared.values.items() if shared and path[0] not in _BY_NAME}
    leaves |= captured.own.values
    is_object = [not isinstance(value, torch.Tensor) for value in leaves.values()]
    return [] if is_object == sorted(is_object) else list(leaves)


def _add_plain(plan: Plan, told: list[tuple[Piece, torch.Tensor]], path: LeafPath, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        plan.objects.append((path, _cached_bytes(path, value)))
        return
    check_has_values(name_of(path), value)
    if value.layout is not torch.strided or value.is_quantized:
        raise TypeError(f"{name_of(path)}: a tensor of layout {value.layout}, expected a dense one")
    if value.numel():
        told += own_pieces(path, value, 0)
    else:
        shape = tuple(value.shape)
        told.append((Piece(path, value.dtype, shape, (0,) * value.ndim, shape), value.detach()))


def _cached_bytes(path: LeafPath, value: Any) -> bytes:
    if type(value) in (bool, int, float, str, type(None)):
        return _number_bytes(type(value).__name__, repr(value), _Value(value))
    return object_bytes(name_of(path), value)


class _Value:
    """Equal to any other, so that only type and text of a value decide about its bytes: 0.0 and -0.0 differ."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Value)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=1024)
def _number_bytes(kind: str, text: str, holder: _Value) -> bytes:
    return object_bytes("a number", holder.value)


def layouts_digest(leaves: Mapping[LeafPath, Any]) -> int:
    """A number of 60 bits that two ranks share if, and but for chance only if, a plan of one fits the other.

    That is, if their values have the same names, their DTensors the same layouts, and their optimizers' groups the same
    parameters.
    """
    digest = hashlib.sha256()
    for path, value in leaves.items():
        names = value if path[-1] == "params" and isinstance(value, list) else None
        digest.update(repr((path, names)).encode())
        if isinstance(value, DTensor) and is_described_by_layout(value):
            layout = Layout.of(path, value)
            look = (str(layout.dtype), layout.shape, layout.placements, layout.mesh_shape)
            digest.update(repr(look).encode())
            digest.update(_ranks_digest(layout.ranks))
    return int.from_bytes(digest.digest()[:8], "little") >> 4


@functools.lru_cache(maxsize=16)
def _ranks_digest(ranks: tuple[int, ...]) -> bytes:
    return hashlib.sha256(repr(ranks).encode()).digest()
