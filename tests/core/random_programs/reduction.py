"""Smaller programs with the same outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tests.core.random_programs.program import Program, normal

_KEEP = {"name", "path", "paths", "same", "world"}


def reduced(program: Program, same: Callable[[Program], bool], tries: int = 300) -> Program:
    """The smallest program that ``same`` holds for, among those that simplifications lead to within ``tries``."""
    program = normal(program)
    seen = {repr(program)}
    progress = True
    while progress and tries > 0:
        progress = False
        for candidate in sorted({repr(c): c for c in map(normal, simpler(program))}.items(), key=lambda i: len(i[0])):
            if candidate[0] in seen or len(candidate[0]) > len(repr(program)):
                continue
            seen.add(candidate[0])
            tries -= 1
            if same(candidate[1]):
                program, progress = candidate[1], True
                break
            if tries <= 0:
                break
    return program


def simpler(value: Any) -> Iterator[Any]:
    """Everything that is one simplification away: a field at its default, an element left out, an element simpler."""
    for field in dataclasses.fields(value):
        current = getattr(value, field.name)
        if field.name not in _KEEP and field.default is not dataclasses.MISSING and current != field.default:
            yield dataclasses.replace(value, **{field.name: field.default})
        if field.name == "paths" and len(current) > 1:
            yield from (dataclasses.replace(value, paths=(path,)) for path in current)
        elif isinstance(current, tuple) and field.name != "paths":
            yield from (dataclasses.replace(value, **{field.name: one}) for one in _simpler_tuples(current))
        elif dataclasses.is_dataclass(current):
            yield from (dataclasses.replace(value, **{field.name: one}) for one in simpler(current))
    if isinstance(value, Program) and value.policy.world != 2 and not value.policy.hsdp:
        yield dataclasses.replace(value, policy=dataclasses.replace(value.policy, world=2))


def _simpler_tuples(elements: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if len(elements) > 2:
        half = len(elements) // 2
        yield elements[:half]
        yield elements[half:]
    for index, element in enumerate(elements):
        yield elements[:index] + elements[index + 1 :]
        if isinstance(element, str) and element in _PLAINER:
            yield (*elements[:index], _PLAINER[element], *elements[index + 1 :])
        if dataclasses.is_dataclass(element):
            yield from ((*elements[:index], one, *elements[index + 1 :]) for one in simpler(element))


_PLAINER = {"mlp": "linear", "table": "linear", "tanh_": "add_", "mul_": "add_", "flat_view": "view", "slice": "view"}
