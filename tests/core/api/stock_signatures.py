"""The signatures of stock FSDP2 in each torch version, kept as data beside this file.

    python -m tests.core.api.stock_signatures --write [WHEEL ...]

adds the torch that is installed, and that of every wheel named, to `stock_signatures.json`; without `--write` it only
compares. Sources are parsed and never imported, so a wheel needs neither its CUDA libraries nor its Python version:
`pip download --no-deps torch==2.12.0` is enough.
"""

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

DATA = Path(__file__).with_suffix(".json")
_FOLDER = "torch/distributed/fsdp/_fully_shard"
_FILES = ("_fully_shard.py", "_fsdp_api.py")

# name of a function, method ("Class.method") or class (its fields) -> its parameters, as [name, kind, default]
Signatures: TypeAlias = dict[str, list[list[str | None]]]


def _parameters(function: ast.FunctionDef) -> Iterator[list[str | None]]:
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(plain, defaults, strict=True):
        yield [argument.arg, "positional", None if default is None else ast.unparse(default)]
    if arguments.vararg is not None:
        yield [arguments.vararg.arg, "varargs", None]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield [argument.arg, "keyword", None if default is None else ast.unparse(default)]
    if arguments.kwarg is not None:
        yield [arguments.kwarg.arg, "kwargs", None]


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _of_class(cls: ast.ClassDef) -> Signatures:
    """Its public methods, and under its own name the fields of a dataclass."""
    found: Signatures = {}
    fields = []
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_public(node.target.id):
            default = None if node.value is None else ast.unparse(node.value)
            kind = "keyword" if default is not None and "kw_only=True" in default else "positional"
            fields.append([node.target.id, kind, default])
        elif isinstance(node, ast.FunctionDef) and (_is_public(node.name) or node.name == "__call__"):
            is_property = any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list)
            # Of overloads the last stays, which is the function.
            found[f"{cls.name}.{node.name}"] = [] if is_property else list(_parameters(node))
    return {cls.name: fields} | found


def signatures(read: Callable[[str], str]) -> Signatures:
    """Everything public in the sources of stock FSDP2; `read` returns a file of torch by its path."""
    found: Signatures = {}
    for file in _FILES:
        for node in ast.parse(read(f"{_FOLDER}/{file}")).body:
            if isinstance(node, ast.ClassDef) and _is_public(node.name):
                found |= _of_class(node)
            elif isinstance(node, ast.FunctionDef) and _is_public(node.name):
                found[node.name] = list(_parameters(node))
    return {name: found[name] for name in sorted(found)}


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def installed() -> tuple[str, Signatures]:
    """The minor version ("2.13") and signatures of the torch that is installed."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    version = ast.literal_eval((root / "version.py").read_text().split("__version__ = ")[1].splitlines()[0])
    return _minor(version), signatures(lambda path: (root.parent / path).read_text())


def of_wheel(wheel: Path) -> tuple[str, Signatures]:
    """The same of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return _minor(wheel.name.split("-")[1]), signatures(lambda path: archive.read(path).decode())


def known() -> dict[str, Signatures]:
    """The signatures in the file, by minor version."""
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def _written(versions: dict[str, Signatures]) -> str:
    """JSON with one line for each function, so that a diff shows the changes of a version."""
    lines: list[str] = []
    for version, functions in sorted(versions.items()):
        body = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in functions.items())
        lines.append(f"  {json.dumps(version)}: {{\n{body}\n  }}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.core.api.stock_signatures", description=__doc__)
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    parser.add_argument("--write", action="store_true", help="take them over into the file")
    options: Any = parser.parse_args(arguments)
    before = known()
    seen = dict([installed(), *map(of_wheel, options.wheels)])
    differing = [version for version, functions in seen.items() if before.get(version) != functions]
    if options.write:
        DATA.write_text(_written(before | seen))
    for version in seen:
        print(f"torch {version}: {'differs from' if version in differing else 'as in'} {DATA.name}")
    return int(bool(differing) and not options.write)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
