"""Rewrites a training script that was written for FSDP1: its imports, and what is called through them.

What maps one to one is changed; the rest is left alone and reported, with the line and what to decide. Formatting and
comments stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider

__all__ = ["Finding", "Rewritten", "rewrite"]

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
    "_fsdp_wrapped_module": "still there; .module says the same without a private name",
}
_REFUSED = {"FlatParameter", "FlatParamHandle"}


@dataclass(frozen=True)
class Finding:
    """Something that a person must decide."""

    line: int
    text: str


@dataclass
class Rewritten:
    """A rewritten script and what is left to decide."""

    source: str
    findings: list[Finding] = field(default_factory=list)


def rewrite(source: str) -> Rewritten:
    """Rewrites the source of a script.

    Raises:
        SyntaxError: for a source that is no Python.
    """
    try:
        wrapper = MetadataWrapper(cst.parse_module(source))
    except cst.ParserSyntaxError as error:
        raise SyntaxError(str(error)) from error
    transformer = _Rewriter()
    module = wrapper.visit(transformer)
    if transformer.needs_import:
        module = _with_import(module)
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
    first, *rest = name.split(".")
    node: cst.Attribute | cst.Name = cst.Name(first)
    for part in rest:
        node = cst.Attribute(node, cst.Name(part))
    return node


class _Rewriter(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.needs_import = False
        self._in_import = False

    def _note(self, node: cst.CSTNode, text: str) -> None:
        line = self.get_metadata(PositionProvider, node).start.line
        self.findings.append(Finding(line, text))

    # -- imports -------------------------------------------------------------------------------------------------------

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802
        self._in_import = True
        return True

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:  # noqa: N802
        self._in_import = False
        names = []
        for alias in updated_node.names:
            name = _name_of(alias.name)
            if name in _MODULES and alias.asname is not None:
                alias = alias.with_changes(name=_node_of(_MODULES[name]))
            elif name in _MODULES:
                self.needs_import = True
                alias = alias.with_changes(name=_node_of(_MODULES[name]))
            elif name.startswith(f"{STOCK}."):
                self._note(original_node, f"'{name}' is private to stock FSDP and has no counterpart")
            names.append(alias)
        return updated_node.with_changes(names=names)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802
        self._in_import = True
        return True

    def leave_ImportFrom(  # noqa: N802
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.FlattenSentinel[cst.BaseSmallStatement]:
        self._in_import = False
        module = _name_of(updated_node.module)
        if module == "torch.distributed" and not isinstance(updated_node.names, cst.ImportStar):
            return self._from_distributed(original_node, updated_node)
        if module.startswith(f"{STOCK}.") and module not in _MODULES:
            self._note(original_node, f"'{module}' is private to stock FSDP and has no counterpart")
            return updated_node
        if module not in _MODULES:
            return updated_node
        if isinstance(updated_node.names, cst.ImportStar):
            return updated_node.with_changes(module=_node_of(_MODULES[module]))
        for alias in updated_node.names:
            if _name_of(alias.name) in _REFUSED:
                self._note(original_node, f"{_name_of(alias.name)}: {_FLAT}")
        ours = [one for one in updated_node.names if _name_of(one.name) not in _FSDP2]
        core = [one for one in updated_node.names if _name_of(one.name) in _FSDP2]
        return _split(updated_node, [(_MODULES[module], ours), (CORE, core)])

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

    def leave_Attribute(  # noqa: N802
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        if self._in_import:
            return updated_node
        attribute = original_node.attr.value
        if attribute in _ATTRIBUTES:
            self._note(original_node, f".{attribute}: {_ATTRIBUTES[attribute]}")
        name = _name_of(updated_node)
        if name == STOCK:
            self.needs_import = True
            return _node_of(OURS)
        return updated_node

    def visit_Call(self, node: cst.Call) -> bool:  # noqa: N802
        if m.matches(node.func, m.Attribute(attr=m.Name("state_dict"))) and "optim" in _name_of(node.func).lower():
            self._note(
                node,
                "optimizer.state_dict() holds one DTensor a parameter; use FSDP.optim_state_dict for what is saved",
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
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return [one.with_changes(comma=comma) for one in names[:-1]] + [
        names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    ]


def _with_import(module: cst.Module) -> cst.Module:
    """Adds `import shardkit.legacy_fsdp_compat` for qualified uses, behind the imports at the top, if it is missing."""
    statement = cst.parse_statement(f"import {OURS}\n")
    last = -1
    for number, one in enumerate(module.body):
        if m.matches(one, m.SimpleStatementLine(body=[m.Import() | m.ImportFrom(), m.ZeroOrMore()])):
            last = number
            if module.code_for_node(one).strip() == f"import {OURS}":
                return module
    return module.with_changes(body=[*module.body[: last + 1], statement, *module.body[last + 1 :]])
