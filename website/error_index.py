"""The page of errors: of every error that the packages raise its cause, its remedy, and where it is raised."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import error_remedies
from error_sources import Raised, Sources

_PACKAGES = ("core", "tp_adapter", "legacy_fsdp_compat", "tools")

# Functions whose errors are not for users, with the reason.
NOT_FOR_USERS = {
    "shardkit.core.parameters.placed._first": "an invariant: torch passes such a tensor",
    "shardkit.legacy_fsdp_compat.__getattr__": "Python's own words for a name that a module lacks",
    "shardkit.tools.__getattr__": "Python's own words for a name that a module lacks",
    "shardkit.tools.torch_compat.FakeTensors._pictured": "caught in the same file",
}

# Functions that raise an error made elsewhere, again or with a prefix, with the reason.
PASSED_ON = {
    "shardkit.core.checkpoint.errors.damage_of": "adds the file",
    "shardkit.core.checkpoint.full_state._agreed": "raises rank 0's error on every rank",
    "shardkit.core.checkpoint.full_state._check_agreement": "adds the rank",
    "shardkit.core.checkpoint.full_state._judge": "raises rank 0's error on every rank",
    "shardkit.core.checkpoint.saving.write_file": "raises the error of a thread",
    "shardkit.core.checkpoint.writers.objects_for_stock": "changes the kind of `leaves.flatten`'s error",
    "shardkit.commands.users_code.users_code": "raises the error that the user's code was interrupted by",
    "shardkit.legacy_fsdp_compat.migrate.rank_files.without_mesh": "changes the kind of `region`'s error",
    "shardkit.legacy_fsdp_compat.migrate.script.rewrite": "the parser's own words",
    "shardkit.legacy_fsdp_compat.migrate.wrapping.wrapping_of_config": "adds the file",
    "shardkit.tools.report.measures.parse_limit": "adds the limit to `quantities.parse_quantity`'s error",
    "shardkit.weights.receiver.WeightReceiver._next": "raises the error of `plan.plan`, which sender 0 has passed on",
}

# Functions whose errors end the message of another one for the user: words of that message, or its class.
PARTS = {
    "shardkit.core.checkpoint.index.": "DamagedCheckpointError",
    "shardkit.core.checkpoint.leaves.decode_path": "DamagedCheckpointError",
    "shardkit.core.checkpoint.pickled.": "holds more than tensors and plain containers",
    "shardkit.core.checkpoint.stock_metadata.": "DamagedCheckpointError",
    "shardkit.core.checkpoint.torch_files.layout_in": "DamagedCheckpointError",
    "shardkit.legacy_fsdp_compat.migrate.rank_files.StoredShards.": "DamagedCheckpointError",
    "shardkit.legacy_fsdp_compat.migrate.rank_files._attribute": "holds more than tensors and plain containers",
    "shardkit.legacy_fsdp_compat.migrate.rank_files._rank_of": "DamagedCheckpointError",
    "shardkit.legacy_fsdp_compat.migrate.rank_files._sizes": "DamagedCheckpointError",
    "shardkit.tools.report.schema.": "is not a record of this version",
}


@dataclass(frozen=True)
class Row:
    """A row of the page; a cause or remedy that the sources lack is None."""

    kind: str
    cause: str | None
    remedy: str | None
    module: str
    function: str

    @property
    def place(self) -> str:
        return f"{self.module}.{self.function}"


class Index:
    """The rows of every module; `left_out` has those that the page omits."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        found = {module: self._rows(module) for module in sources.trees}
        self.left_out = [row for rows in found.values() for row in rows if _is_left_out(row)]
        self.rows = {module: [row for row in rows if not _is_left_out(row)] for module, rows in found.items()}
        self.rows = {module: [self._within(row) for row in rows] for module, rows in self.rows.items()}

    @classmethod
    @functools.cache
    def of(cls, root: Path) -> Index:
        """That of the packages of this repository."""
        return cls(sources_of(root))

    def all(self) -> Iterator[Row]:
        for rows in self.rows.values():
            yield from rows

    def _rows(self, module: str) -> list[Row]:
        rows = {self._row(one) for one in self._sources.raised(module)}
        return sorted(rows, key=lambda row: (row.function, row.cause or "", row.remedy or "", row.kind))

    def _row(self, raised: Raised) -> Row:
        if raised.message is None:
            return Row(raised.kind, None, None, raised.module, raised.function)
        parts = error_remedies.split(raised.message)
        remedy = (
            parts.remedy
            or error_remedies.remedy_of_class(self._sources.docstring(raised.kind))
            or error_remedies.implied(raised.message)
        )
        return Row(raised.kind, parts.cause, remedy, raised.module, raised.function)

    def _within(self, row: Row) -> Row:
        """The row, as the error that has its message at the end if the user sees that one."""
        outer = next((outer for place, outer in PARTS.items() if row.place.startswith(place)), None)
        if outer is None or row.kind.endswith("CheckpointError"):
            return row
        around = next((one for one in self.all() if outer in (one.cause or "")), None)
        if around is None:
            remedy = error_remedies.remedy_of_class(self._sources.docstring(outer))
            around = Row(outer, None, remedy, "", "")
        return Row(around.kind, f"...: {row.cause}", around.remedy, row.module, row.function)


@functools.cache
def sources_of(root: Path) -> Sources:
    """The sources of the packages of this repository."""
    return Sources.below(*(root / "packages" / package / "src" for package in _PACKAGES))


def _is_left_out(row: Row) -> bool:
    return row.place in NOT_FOR_USERS or (row.cause is None and row.place in PASSED_ON)


def page(root: Path) -> str:
    """The page: a section for each module that raises, sorted by module."""
    index = Index.of(root)
    lines = [
        "# Errors",
        "",
        "Every error that shardkit raises, generated from the sources. Search this page for a few words of your",
        "message; `{...}` stands for a value. Most messages have the cause and then the remedy. A cause that begins",
        "with `...` stands at the end of a longer message.",
        "The commands end with status 2 after an error in a file or an option.",
        "",
    ]
    for package in _PACKAGES:
        lines += [f"## shardkit.{package}", ""]
        for module, rows in index.rows.items():
            if rows and _package_of(module) == package:
                lines += [f"### `{module}`", "", "| error | cause | remedy | raised in |", "|---|---|---|---|"]
                lines += [
                    f"| {_name(row.kind)} | {_cell(row.cause or '')} | {_cell(row.remedy or '')} "
                    f"| <code>{_name(row.function)}</code> |"
                    for row in rows
                ]
                lines.append("")
    return "\n".join(lines)


def _package_of(module: str) -> str:
    """The package whose directory has the module: core's has others than shardkit.core as well."""
    name = module.split(".")[1]
    return name if name in _PACKAGES else "core"


def _cell(text: str) -> str:
    """Text as it is, in a cell of a table, with places to break words that would widen the table.

    Braces are escaped because at the end of a cell they would be attributes of it.
    """
    text = re.sub(r"\S{20,}", lambda word: re.sub(r"(?<=\w[_.=,/(])(?=\w)", "\0", word[0]), text)
    for character in "\\`*_<[|{}":
        text = text.replace(character, "\\" + character)
    return text.replace("\0", "<wbr>")


def _name(name: str) -> str:
    """A name that may break between any of its words."""
    return _cell(re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=\.)|(?<=[a-z]_)(?=[a-z])", "\0", name))
