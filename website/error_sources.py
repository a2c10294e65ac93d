"""Reads the errors that sources raise: each `raise`, directly or through a helper, with its kind and its message."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_DEEP = 8  # helpers that call helpers
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Raised:
    """One `raise`, with {...} where a value stands in the message; None if the message cannot be read."""

    kind: str
    message: str | None
    module: str
    function: str


@dataclass(frozen=True)
class Scope:
    """Names that an expression may use: those of its module, class and function, and what a caller passed."""

    module: str
    owner: ast.ClassDef | None = None
    function: _Function | None = None
    passed: dict[str, str] = field(default_factory=dict)


class Sources:
    """The modules of packages, parsed."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self.trees = trees
        self._names = {module: _top_level(tree) for module, tree in trees.items()}
        self._imported = {module: _imported(tree) for module, tree in trees.items()}
        self._methods: dict[str, list[Scope]] = {}
        for module, tree in trees.items():
            for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
                for one in owner.body:
                    if isinstance(one, _Function):
                        self._methods.setdefault(one.name, []).append(Scope(module, owner, one))

    @classmethod
    def below(cls, *directories: Path) -> Sources:
        """Those of every file below the directories, which hold packages."""
        trees = {}
        for directory in directories:
            for path in sorted(directory.rglob("*.py")):
                name = ".".join(path.relative_to(directory).with_suffix("").parts).removesuffix(".__init__")
                trees[name] = ast.parse(path.read_text())
        return cls(trees)

    def raised(self, module: str) -> Iterator[Raised]:
        """Every `raise` of a module, except those that pass on the error being handled."""
        yield from self._below(self.trees[module], Scope(module), "")

    def docstring(self, kind: str) -> str | None:
        """That of the class of errors with this name; None if the sources define none."""
        for names in self._names.values():
            if isinstance(found := names.get(kind), ast.ClassDef):
                return ast.get_docstring(found)
        return None

    def _below(self, node: ast.AST, scope: Scope, path: str) -> Iterator[Raised]:
        if isinstance(node, _Function | ast.ClassDef):
            path = f"{path}.{node.name}" if path else node.name
            if isinstance(node, ast.ClassDef):
                scope = Scope(scope.module, node)
            elif isinstance(node, _Function):
                scope = Scope(scope.module, scope.owner, node)
        if isinstance(node, ast.Raise) and node.exc is not None:
            for kind, message in self._errors(node.exc, scope, _DEEP):
                yield Raised(kind, message, scope.module, path)
        for child in ast.iter_child_nodes(node):
            yield from self._below(child, scope, path)

    def _find(self, name: str, module: str) -> tuple[str, ast.AST] | None:
        """The module and the definition or value that a global name of `module` stands for."""
        for _ in range(_DEEP):
            if name in self._names.get(module, {}):
                return module, self._names[module][name]
            if name not in self._imported.get(module, {}):
                return None
            module, name = self._imported[module][name]
        return None

    def _errors(self, made: ast.expr, scope: Scope, deep: int) -> Iterator[tuple[str, str | None]]:
        """The kinds and messages of the errors that an expression may make."""
        if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Name | ast.Attribute) or not deep:
            yield ast.unparse(made), None
        elif (helper := self._helper(made, scope, deep)) is not None:
            returns = [one.value for one in _own_nodes(helper.function) if isinstance(one, ast.Return) and one.value]
            for one in returns:
                yield from self._errors(one, helper, deep - 1)
        else:
            message = next((text for one in made.args if (text := self.text(one, scope, deep)) is not None), None)
            for kind in self._kinds(made.func, scope):
                found = self._find(kind, scope.module)
                own = None if found is None else self._words_of_class(found, deep)
                yield kind, own or message

    def _helper(self, call: ast.Call, scope: Scope, deep: int) -> Scope | None:
        """The function or method that is called, knowing the texts that this call passes; None if it is a class."""
        match call.func:
            case ast.Name(id=name) if (found := self._find(name, scope.module)) and isinstance(found[1], _Function):
                helper = Scope(found[0], None, found[1])
            case ast.Attribute(attr=name) if not isinstance(call.func.value, ast.Constant):
                known = self._methods.get(name, [])
                own = [one for one in known if one.owner is scope.owner]
                if len(own or known) != 1:
                    return None
                helper = (own or known)[0]
            case _:
                return None
        assert helper.function is not None
        names = [one.arg for one in helper.function.args.args if one.arg != "self"]
        given = [*zip(names, call.args, strict=False), *((one.arg, one.value) for one in call.keywords if one.arg)]
        defaults = helper.function.args.defaults
        given = [*zip(names[len(names) - len(defaults) :], defaults, strict=True), *given]
        passed = {name: text for name, value in given if (text := self.text(value, scope, deep // 2)) is not None}
        return Scope(helper.module, helper.owner, helper.function, passed)

    def _kinds(self, func: ast.expr, scope: Scope) -> list[str]:
        """The names of the classes that a name may stand for: itself, or what was passed or assigned to it."""
        if isinstance(func, ast.Name) and scope.function is not None:
            arguments = scope.function.args
            defaults = dict(zip([one.arg for one in arguments.args][::-1], arguments.defaults[::-1], strict=False))
            if (kind := _annotated(scope.function).get(func.id)) is not None:
                return [kind]
            value = _assigned(scope.function).get(func.id) or defaults.get(func.id)
            if isinstance(value, ast.IfExp):
                return [ast.unparse(value.body), ast.unparse(value.orelse)]
            if isinstance(value, ast.Name):
                return [value.id]
        return [ast.unparse(func).rsplit(".", 1)[-1]]

    def _words_of_class(self, found: tuple[str, ast.AST], deep: int) -> str | None:
        """The message that a class of errors builds in its `__init__`."""
        module, owner = found
        for one in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(one, _Function) and one.name == "__init__":
                for call in (node for node in ast.walk(one) if isinstance(node, ast.Call)):
                    if ast.unparse(call.func) == "super().__init__" and call.args:
                        return self.text(call.args[0], Scope(module, owner, one), deep - 1)
        return None

    def text(self, node: ast.expr, scope: Scope, deep: int = _DEEP) -> str | None:
        """The text that an expression makes, None if it has no words of its own."""
        if not deep:
            return None
        match node:
            case ast.Constant(value=str(value)):
                return value
            case ast.JoinedStr(values=parts):
                made = "".join(self._part(part, scope, deep - 1) for part in parts)
                return made if _has_words(made) else None
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                both = [self.text(left, scope, deep - 1), self.text(right, scope, deep - 1)]
                return "".join(one or "{...}" for one in both) if any(both) else None
            case ast.IfExp(body=body, orelse=orelse):
                return self.text(body, scope, deep - 1) or self.text(orelse, scope, deep - 1)
            case ast.BoolOp(values=values):
                return next((text for one in values if (text := self.text(one, scope, deep - 1))), None)
            case ast.Name(id=name):
                return self._text_of_name(name, scope, deep - 1)
            case ast.Call(func=ast.Attribute(value=value, attr="format")):
                return self.text(value, scope, deep - 1)
            case ast.Call() if (helper := self._helper(node, scope, deep)) is not None:
                returns = [one.value for one in _own_nodes(helper.function) if isinstance(one, ast.Return)]
                made = [text for one in returns if one is not None and (text := self.text(one, helper, deep - 1))]
                if not made:  # it chooses among its arguments
                    made = [text for one in node.args if (text := self.text(one, scope, deep - 1))]
                return made[0] if made else None
        return None

    def _text_of_name(self, name: str, scope: Scope, deep: int) -> str | None:
        if name in scope.passed:
            return scope.passed[name]
        if scope.function is not None and (value := _assigned(scope.function).get(name)) is not None:
            return self.text(value, scope, deep)
        found = self._find(name, scope.module)
        return self.text(found[1], Scope(found[0]), deep) if found and isinstance(found[1], ast.expr) else None

    def _part(self, part: ast.expr, scope: Scope, deep: int) -> str:
        if isinstance(part, ast.Constant):
            return str(part.value)
        assert isinstance(part, ast.FormattedValue)
        inner = part.value
        if isinstance(inner, ast.Name | ast.IfExp) and (text := self.text(inner, scope, deep)) and " " in text:
            return text
        while isinstance(inner, ast.Call | ast.Attribute | ast.Subscript):
            if isinstance(inner, ast.Attribute):
                return f"{{{inner.attr}}}"
            inner = inner.func if isinstance(inner, ast.Call) else inner.value
        return f"{{{inner.id}}}" if isinstance(inner, ast.Name) else "{...}"


def _has_words(text: str) -> bool:
    """Whether letters stand outside of {...}."""
    depth = 0
    for one in text:
        depth += (one == "{") - (one == "}")
        if not depth and one.isalpha():
            return True
    return False


def _top_level(tree: ast.Module) -> dict[str, ast.AST]:
    """Functions, classes and values that a module defines."""
    names: dict[str, ast.AST] = {}
    for one in tree.body:
        match one:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] = one
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                names[name] = value
    return names


def _imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """For each name that a module imports from another, that module and the name there."""
    return {
        one.asname or one.name: (node.module, one.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for one in node.names
    }


@cache
def _assigned(function: _Function) -> dict[str, ast.expr]:
    """The values that names of a function get; of several the longest, which has the most words."""
    values: dict[str, ast.expr] = {}
    for one in _own_nodes(function):
        match one:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
            ):
                values[name] = max(value, values.get(name, value), key=_length)
    return values


def _annotated(function: _Function) -> dict[str, str]:
    """The classes that names of a function are annotated with, as in `kind: type[OSError] = ...`."""
    return {
        one.target.id: ast.unparse(one.annotation.slice)
        for one in _own_nodes(function)
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and isinstance(one.annotation, ast.Subscript)
        and ast.unparse(one.annotation.value) == "type"
    }


def _length(value: ast.expr) -> int:
    return len(ast.unparse(value))


def _own_nodes(function: ast.AST | None) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(function) if function is not None else ():
        if not isinstance(child, _Function | ast.ClassDef | ast.Lambda):
            yield child
            yield from _own_nodes(child)
