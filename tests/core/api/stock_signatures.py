"""The signatures of stock FSDP2 in each torch version, kept as data beside this file.

    python -m tests.core.api.stock_signatures

writes those of the torch that is installed to `stock_signatures.json`; run it in the environment of each version.
"""

import inspect
import json
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fully_shard

DATA = Path(__file__).with_suffix(".json")
VERSION = ".".join(torch.__version__.split(".")[:2])
KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.VAR_POSITIONAL: "varargs",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "kwargs",
}

# name of a function, method ("Class.method") or class (its fields) -> its parameters, as [name, kind, has a default]
Signatures: TypeAlias = dict[str, list[tuple[str, str, bool]]]


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


def _parameters(function: Any) -> list[tuple[str, str, bool]]:
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, KINDS[one.kind], one.default is not inspect.Parameter.empty) for one in parameters]


def known() -> dict[str, Signatures]:
    """The signatures in the file, by version."""
    versions = json.loads(DATA.read_text()) if DATA.exists() else {}
    return {
        version: {name: [tuple(one) for one in parameters] for name, parameters in functions.items()}
        for version, functions in versions.items()
    }


def written(versions: dict[str, Signatures]) -> str:
    """JSON with one line for each function, so that a diff shows the changes of a version."""
    lines: list[str] = []
    for version, functions in sorted(versions.items()):
        body = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in functions.items())
        lines.append(f"  {json.dumps(version)}: {{\n{body}\n  }}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    DATA.write_text(written(known() | {VERSION: installed()}))
