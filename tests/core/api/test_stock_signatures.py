"""Our public functions take all arguments of stock's, of every torch version that we support.

    python -m tests.core.api.test_stock_signatures

writes the signatures of the torch that is installed to `stock_signatures.json`; run it in each version's environment.
"""

import inspect
import json
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fully_shard

import shardkit.core as shardkit
from shardkit.core import policies

DATA = Path(__file__).with_name("stock_signatures.json")
VERSION = ".".join(torch.__version__.split(".")[:2])
KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.VAR_POSITIONAL: "varargs",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "kwargs",
}

# name of a function, method ("Class.method") or class (its fields) -> its parameters, as [name, kind, has a default]
Signatures: TypeAlias = dict[str, list[list[Any]]]


def installed() -> Signatures:
    """Everything public in the modules of stock FSDP2."""
    found: Signatures = {}
    for module in (_fully_shard, _fsdp_api):
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", "") not in (module.__name__, fsdp.__name__):
                continue
            if inspect.isfunction(value):
                found[name] = _parameters(value)
            elif inspect.isclass(value):
                found[name] = _parameters(value) if is_dataclass(value) else []
                for method, of in vars(value).items():
                    if inspect.isfunction(of) and (not method.startswith("_") or method == "__call__"):
                        found[f"{name}.{method}"] = _parameters(of)
                    elif isinstance(of, property):
                        found[f"{name}.{method}"] = []
    return {name: found[name] for name in sorted(found)}


def _parameters(function: Any) -> list[list[Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [[one.name, KINDS[one.kind], one.default is not inspect.Parameter.empty] for one in parameters]


def written(versions: dict[str, Signatures]) -> str:
    """JSON with one line for each function, so that a diff shows the changes of a version."""
    lines: list[str] = []
    for version, functions in sorted(versions.items()):
        body = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in functions.items())
        lines.append(f"  {json.dumps(version)}: {{\n{body}\n  }}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


VERSIONS: dict[str, Signatures] = json.loads(DATA.read_text())
# Stock's own plumbing, which no user calls.
_NOT_FOR_USERS = {"get_cls_to_fsdp_cls", "disable_fsdp_module_new_init"}


def test_data_of_the_torch_installed() -> None:
    """If this fails: python -m tests.core.api.test_stock_signatures."""
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


def _differences(ours: Any, expected: list[list[Any]]) -> list[str]:
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


if __name__ == "__main__":
    DATA.write_text(written(VERSIONS | {VERSION: installed()}))
