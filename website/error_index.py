"""The errors that the packages raise, read from their sources: what is raised, with which words, and where."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NOT_FOR_USERS = {"AttributeError", "AssertionError", "StopIteration", "SystemExit", "KeyError", "IndexError"}
_PACKAGES = ("core", "tp_adapter", "legacy_fsdp_compat", "tools")


@dataclass(frozen=True)
class Raised:
    """One `raise` with a message."""

    kind: str
    message: str
    module: str
    function: str


def raised(source: Path, module: str) -> Iterator[Raised]:
    """Every `raise Kind("message ...")` of a file, with {...} where a value stands in the message."""
    yield from _below(ast.parse(source.read_text()), module, "", {})


def _below(node: ast.AST, module: str, function: str, texts: dict[str, ast.expr]) -> Iterator[Raised]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}" if function else node.name
    if isinstance(node, ast.Module):
        texts = {}
        for statement in node.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                texts[statement.targets[0].id] = statement.value
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        kind = ast.unparse(node.exc.func).rsplit(".", 1)[-1]
        message = _text(node.exc.args[0], texts)
        if kind[0].isupper() and kind not in _NOT_FOR_USERS and message is not None:
            yield Raised(kind, message, module, function)
    for child in ast.iter_child_nodes(node):
        yield from _below(child, module, function, texts)


def _text(node: ast.expr, texts: dict[str, ast.expr]) -> str | None:
    """The message that an expression makes, None if it has no words of its own."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            made = "".join(_part(part) for part in parts)
            return made if any(isinstance(part, ast.Constant) for part in parts) else None
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = [_text(left, texts), _text(right, texts)]
            return "".join(one or "{...}" for one in both) if any(both) else None
        case ast.Name(id=name) if name in texts:
            return _text(texts[name], {})
        case ast.Call(func=ast.Attribute(value=value, attr="format")):
            return _text(value, texts)
    return None


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    inner = part.value
    while isinstance(inner, ast.Call | ast.Attribute | ast.Subscript):
        if isinstance(inner, ast.Attribute):
            return f"{{{inner.attr}}}"
        inner = inner.func if isinstance(inner, ast.Call) else inner.value
    return f"{{{inner.id}}}" if isinstance(inner, ast.Name) else "{...}"


def page(root: Path) -> str:
    """The page: a section for each module that raises, sorted by module."""
    lines = [
        "# Errors",
        "",
        "Every error that shardkit raises with a message, generated from the sources. A message says what is wrong and",
        "where, and what to do. Search this page for a few words of yours; `{...}` stands for a value. The commands",
        "end with status 2 after an error in a file or an option.",
        "",
    ]
    for package in _PACKAGES:
        source = root / "packages" / package / "src"
        lines += [f"## shardkit.{package}", ""]
        for path in sorted(source.rglob("*.py")):
            module = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
            found = sorted(set(raised(path, module)), key=lambda one: (one.function, one.message))
            if not found:
                continue
            lines += [f"### `{module}`", "", "| error | message | raised in |", "|---|---|---|"]
            lines += [f"| {one.kind} | {_cell(one.message)} | `{one.function}` |" for one in found] + [""]
    return "\n".join(lines)


def _cell(message: str) -> str:
    """Text as it is, in a cell of a table."""
    one_line = " ".join(message.split())
    for character in "\\`*_<[|":
        one_line = one_line.replace(character, "\\" + character)
    return one_line
