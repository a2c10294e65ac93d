"""Rewrites a training script that was written for FSDP1: its imports, and uses of the imported names.

Names with a direct counterpart are replaced; others are left alone and reported, with the line and the decision to
make. Formatting and comments are preserved. `migrate script FILE` shows the result as a diff, or writes it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider

from shardkit.core.checkpoint.terminal import note

STOCK, OURS, CORE = "torch.distributed.fsdp", "shardkit.legacy_fsdp_compat", "shardkit.core"
_MODULES = {
    STOCK: OURS,
    **{
        f"{STOCK}.{name}": f"{OURS}.{name}"
        for name in ("api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap")
    },
}
_FSDP2 = {
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
}
_FLAT = "parameters stay separate here: use FSDP.summon_full_params for whole values, parameter.to_local() for rows"
_ATTRIBUTES = {
    "_flat_param": _FLAT,
    "_handle": _FLAT,
    "_handles": _FLAT,
    "flat_param": _FLAT,
    "_fsdp_wrapped_module": "still there; .module is the same without a private name",
}
_LOST = (
    "on a parameter or its gradient it raises in the next forward or step, except on whole parameters inside "
    "FSDP.summon_full_params; write in place (copy_)"
)
_REFUSED = {"FlatParameter", "FlatParamHandle"}
_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


@dataclass(frozen=True)
class Finding:
    """A decision that the user must make."""

    line: int
    text: str


@dataclass
class Rewritten:
    """A rewritten script and the decisions that remain."""

    source: str
    findings: list[Finding] = field(default_factory=list)


def rewrite(source: str) -> Rewritten:
    """Rewrites the source of a script. Raises SyntaxError if it is not Python."""
    try:
        wrapper = MetadataWrapper(cst.parse_module(source))
    except cst.ParserSyntaxError as error:
        raise SyntaxError(str(error)) from error
    names = _Names()
    wrapper.module.visit(names)
    transformer = _Rewriter(names)
    module = wrapper.visit(transformer)
    for needed in sorted(transformer.needed):
        module = _with_import(module, needed)
    return Rewritten(module.code, sorted(transformer.findings, key=lambda one: one.line))


def _name_of(node: cst.BaseExpression | None) -> str:
    """A dotted name, empty for any other expression."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = _name_of(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def _node_of(name: str) -> cst.Attribute | cst.Name:
    return cast(cst.Attribute | cst.Name, cst.parse_expression(name))


def _has(module: str, name: str) -> bool:
    """Whether our counterpart of a module of stock has a name."""
    return name not in _REFUSED and hasattr(importlib.import_module(_MODULES[module]), name)


def _is_stock(name: str) -> bool:
    return f"{name}.".startswith(f"{STOCK}.")


def _missing(module: str, name: str) -> str:
    return (
        f"{name}: {_FLAT}" if name in _REFUSED else f"'{module}.{name}' is private to stock FSDP, or has no counterpart"
    )


class _Names(cst.CSTVisitor):
    """The meaning of names in a script.

    Attributes:
        modules: name -> the module of torch that it was imported as.
        used: every name in the script.
        binds_torch: whether a top-level statement that stays binds the name `torch`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, str] = {}
        self.used: set[str] = set()
        self.binds_torch = False

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        imports = [one for line in node.body if isinstance(line, cst.SimpleStatementLine) for one in line.body]
        self.binds_torch = any(
            alias.asname is None and name.split(".")[0] == "torch" and name not in _MODULES
            for one in imports
            if isinstance(one, cst.Import)
            for alias in one.names
            for name in [_name_of(alias.name)]
        )

    def visit_Import(self, node: cst.Import) -> None:  # noqa: N802
        for alias in node.names:
            if alias.asname is not None:
                self.modules[_name_of(alias.asname.name)] = _name_of(alias.name)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802
        for alias in [] if isinstance(node.names, cst.ImportStar) else node.names:
            full = f"{_name_of(node.module)}.{_name_of(alias.name)}"
            if full == "torch.distributed" or full in _MODULES:
                name = alias.name if alias.asname is None else alias.asname.name
                self.modules[_name_of(name)] = full

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        self.used.add(node.value)

    def full_name(self, name: str) -> str:
        """A dotted name with the module's own name in front."""
        first, dot, rest = name.partition(".")
        return self.modules.get(first, first) + dot + rest


class _Rewriter(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, names: _Names) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.needed: set[str] = set()
        self._names = names

    def _note(self, node: cst.CSTNode, text: str) -> None:
        line = self.get_metadata(PositionProvider, node).start.line
        self.findings.append(Finding(line, text))

    # -- imports -------------------------------------------------------------------------------------------------------

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802
        return False  # names inside it are not uses

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:  # noqa: N802
        names = []
        for alias in updated_node.names:
            name = _name_of(alias.name)
            if name in _MODULES:
                if alias.asname is None and not self._names.binds_torch:  # importing a.b.c binds a
                    names.append(cst.ImportAlias(cst.Name("torch"), comma=_COMMA))
                alias = alias.with_changes(name=_node_of(_MODULES[name]))
            elif name.startswith(f"{STOCK}."):
                self._note(original_node, f"'{name}' is private to stock FSDP and has no counterpart")
            names.append(alias)
        return updated_node.with_changes(names=names)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802
        return False

    def leave_ImportFrom(  # noqa: N802
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.FlattenSentinel[cst.BaseSmallStatement]:
        module = _name_of(updated_node.module)
        if module == "torch.distributed" and not isinstance(updated_node.names, cst.ImportStar):
            return self._from_distributed(original_node, updated_node)
        if module.startswith(f"{STOCK}.") and module not in _MODULES:
            self._note(original_node, f"'{module}' is private to stock FSDP and has no counterpart")
            return updated_node
        if module not in _MODULES:
            return updated_node
        if isinstance(updated_node.names, cst.ImportStar):
            return self._from_star(updated_node, module)
        ours, core, left = [], [], []
        for alias in updated_node.names:
            name = _name_of(alias.name)
            if name in _FSDP2:
                core.append(alias)
            elif f"{module}.{name}" in _MODULES or _has(module, name):
                ours.append(alias)
            else:
                self._note(original_node, _missing(module, name))
                left.append(alias)
        return _split(updated_node, [(_MODULES[module], ours), (CORE, core), (module, left)])

    def _from_star(
        self, node: cst.ImportFrom, module: str
    ) -> cst.ImportFrom | cst.FlattenSentinel[cst.BaseSmallStatement]:
        """Imports all of ours; of FSDP2's names, those that the script uses."""
        ours = node.with_changes(module=_node_of(_MODULES[module]))
        fsdp2 = sorted(self._names.used & _FSDP2) if module == STOCK else []
        if not fsdp2:
            return ours
        names = _trimmed([cst.ImportAlias(cst.Name(name)) for name in fsdp2])
        return cst.FlattenSentinel([ours, cst.ImportFrom(_node_of(CORE), names)])

    def _from_distributed(
        self, original: cst.ImportFrom, node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.FlattenSentinel[cst.BaseSmallStatement]:
        """`from torch.distributed import fsdp`."""
        names: Sequence[cst.ImportAlias] = [] if isinstance(node.names, cst.ImportStar) else node.names
        fsdp = [one for one in names if _name_of(one.name) == "fsdp"]
        if not fsdp:
            return node
        rest = [one for one in names if _name_of(one.name) != "fsdp"]
        asname = fsdp[0].asname or cst.AsName(cst.Name("fsdp"))
        renamed = cst.ImportAlias(cst.Name("legacy_fsdp_compat"), asname=asname)
        return _split(node, [("torch.distributed", rest), ("shardkit", [renamed])])

    # -- uses ----------------------------------------------------------------------------------------------------------

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802
        return not _is_stock(self._names.full_name(_name_of(node)))

    def leave_Attribute(  # noqa: N802
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        name = _name_of(original_node)
        for attribute in name.split(".")[1:] or [original_node.attr.value]:
            if attribute in _ATTRIBUTES and (attribute == original_node.attr.value or _is_stock(name)):
                self._note(original_node, f".{attribute}: {_ATTRIBUTES[attribute]}")
        full = self._names.full_name(name)
        return self._qualified(original_node, name, full) if _is_stock(full) else updated_node

    def _qualified(self, node: cst.Attribute, name: str, full: str) -> cst.BaseExpression:
        """A name reached through a module of stock, such as `dist.fsdp.MixedPrecision`."""
        module = max((one for one in _MODULES if f"{full}.".startswith(f"{one}.")), key=len)
        what, _, rest = full.removeprefix(module).removeprefix(".").partition(".")
        if what in _FSDP2:
            self.needed.add(CORE)
            return _node_of(".".join(filter(None, [CORE, what, rest])))
        if what and not _has(module, what):
            self._note(node, _missing(module, what))
            return node
        first = name.split(".", maxsplit=1)[0]
        if _is_stock(self._names.modules.get(first, "")):  # its import has changed
            return node
        self.needed.add(_MODULES[module])
        return _node_of(".".join(filter(None, [_MODULES[module], what, rest])))

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:  # noqa: N802
        for target in m.findall(node.target, m.Attribute(attr=m.Name("data"))):
            assert isinstance(target, cst.Attribute)
            if _name_of(target.value) != "self":  # a data set's own attribute
                self._note(node, f".data = ...: {_LOST}")
        return True

    def visit_Call(self, node: cst.Call) -> bool:  # noqa: N802
        if m.matches(node.func, m.Name("vector_to_parameters") | m.Attribute(attr=m.Name("vector_to_parameters"))):
            self._note(node, f"vector_to_parameters() assigns to .data: {_LOST}")
        if m.matches(node.func, m.Attribute(attr=m.Name("no_sync"))):
            self._note(
                node,
                "no_sync(): optimizer.zero_grad() keeps the gradients of backwards inside, and the next one outside "
                "reduces them; to drop them, call zero_grad() of the FSDP module",
            )
        if m.matches(node.func, m.Attribute(attr=m.Name("state_dict"))) and "optim" in _name_of(node.func).lower():
            self._note(
                node,
                "optimizer.state_dict() holds one DTensor a parameter; to save, use FSDP.optim_state_dict",
            )
        return True


def _split(
    node: cst.ImportFrom, parts: Sequence[tuple[str, Sequence[cst.ImportAlias]]]
) -> cst.ImportFrom | cst.FlattenSentinel[cst.BaseSmallStatement]:
    """One `from ... import` for each module that some of the names are in; an untouched list keeps its layout."""
    filled = [(module, names) for module, names in parts if names]
    if len(filled) == 1:
        module, names = filled[0]
        all_kept = not isinstance(node.names, cst.ImportStar) and len(names) == len(node.names)
        kept = node.names if all_kept and names[0] is node.names[0] else _trimmed(names)  # type: ignore[index]
        return node.with_changes(module=_node_of(module), names=kept)
    return cst.FlattenSentinel(
        [
            node.with_changes(module=_node_of(module), names=_trimmed(names), lpar=None, rpar=None)
            for module, names in filled
        ]
    )


def _trimmed(names: Sequence[cst.ImportAlias]) -> list[cst.ImportAlias]:
    """The names on one line."""
    return [one.with_changes(comma=_COMMA) for one in names[:-1]] + [
        names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    ]


def _with_import(module: cst.Module, name: str) -> cst.Module:
    """Adds an import for qualified uses after the imports at the top, if it is missing."""
    statement = cst.parse_statement(f"import {name}\n")
    last = -1
    for number, one in enumerate(module.body):
        if m.matches(one, m.SimpleStatementLine(body=[m.Import() | m.ImportFrom(), m.ZeroOrMore()])):
            last = number
            if f"import {name}" in [part.strip() for part in module.code_for_node(one).split(";")]:
                return module
    if last < 0 and module.body and m.matches(module.body[0], m.SimpleStatementLine(body=[m.Expr(m.SimpleString())])):
        last = 0  # a docstring stays first
    return module.with_changes(body=[*module.body[: last + 1], statement, *module.body[last + 1 :]])


def main(options: argparse.Namespace) -> int:
    """Runs `migrate script`; returns the exit status."""
    try:
        source = options.file.read_text()
        result = rewrite(source)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        note(f"error: {options.file}: {error}")
        return 2
    name = str(options.file)
    before, after = source.splitlines(keepends=True), result.source.splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))
    for finding in result.findings:
        note(f"{name}:{finding.line}: {finding.text}")
    changed = result.source != source
    if options.write and changed:
        options.file.write_text(result.source)
    does = ("changed" if options.write else "would change (--write does)") if changed else "has nothing to change"
    note(f"{name}: {does}; left for you to decide: {len(result.findings) or 'nothing'}")
    return 0
