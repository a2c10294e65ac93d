"""Our public functions take all arguments of stock's, of every torch version that we support."""

import inspect
from typing import Any

import pytest

import shardkit.core as shardkit
from shardkit.core import policies
from tests.core.api.stock_signatures import KINDS, VERSION, Signatures, installed, known

VERSIONS = known()
# Stock's own plumbing, which no user calls.
_NOT_FOR_USERS = {"get_cls_to_fsdp_cls", "disable_fsdp_module_new_init"}


def test_data_of_the_torch_installed() -> None:
    """If this fails: python -m tests.core.api.stock_signatures."""
    assert VERSIONS.get(VERSION) == installed()


def test_every_supported_version_has_data() -> None:
    assert list(VERSIONS) == ["2.11", "2.12", "2.13", "2.14", "2.15"]


def _ours(name: str) -> Any:
    found: Any = shardkit if hasattr(shardkit, name.partition(".")[0]) else policies
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _lacking(functions: Signatures) -> list[str]:
    problems = []
    for name, expected in functions.items():
        if name in _NOT_FOR_USERS:
            continue
        ours = _ours(name)
        if ours is None:
            problems.append(f"{name} is missing")
        elif expected:
            problems += [f"{name}: {problem}" for problem in _differences(ours, expected)]
    return problems


def _differences(ours: Any, expected: list[tuple[str, str, bool]]) -> list[str]:
    """Arguments that stock accepts and ours does not: by name, by place, or without a value."""
    seen = [one for one in inspect.signature(ours).parameters.values() if one.name != "self"]
    taken = {one.name: one for one in seen}
    by_place = [one.name for one in seen if KINDS[one.kind] == "positional"]
    problems = []
    for place, (parameter, kind, has_default) in enumerate(one for one in expected if one[0] != "self"):
        if kind in ("varargs", "kwargs"):
            if kind not in {KINDS[one.kind] for one in seen}:
                problems.append(f"no {kind}")
        elif parameter not in taken:
            problems.append(f"no parameter {parameter}")
        elif kind == "positional" and by_place[place : place + 1] != [parameter]:
            problems.append(f"{parameter} is not at place {place}")
        elif has_default and taken[parameter].default is inspect.Parameter.empty:
            problems.append(f"{parameter} has no default")
    return problems


@pytest.mark.parametrize("version", VERSIONS)
def test_surface(version: str) -> None:
    assert _lacking(VERSIONS[version]) == []
