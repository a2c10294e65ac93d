"""The workspace's packages and the imports of their sources: read from the files, nothing is imported."""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Import:
    """One imported thing: ``from module import name``, or ``import module`` with ``name`` None."""

    module: str
    name: str | None
    line: int

    @property
    def path(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Source:
    """One Python file of a package, with its dotted module name."""

    path: Path
    module: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(), filename=str(self.path))

    @cache  # noqa: B019 - parsing and walking take seconds for all packages, and several tests ask for the same
    def imports(self) -> list[Import]:
        """Every import of the file, those inside functions included, relative ones resolved."""
        return list(self._imports())

    def _imports(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, None, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield Import(self._absolute(node), alias.name, node.lineno)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]
        parts = package.split(".")
        base = parts[: len(parts) - node.level + 1]
        return ".".join([*base, node.module] if node.module else base)

    def __str__(self) -> str:
        try:
            return str(self.path.relative_to(ROOT))
        except ValueError:
            return str(self.path)


@dataclass(frozen=True)
class Package:
    """One distribution of the workspace: ``packages/<directory>``."""

    path: Path

    @cached_property
    def project(self) -> dict[str, Any]:
        return tomllib.loads((self.path / "pyproject.toml").read_text())["project"]

    @property
    def distribution(self) -> str:
        return self.project["name"]

    @property
    def import_name(self) -> str:
        """``shardkit-core`` is imported as ``shardkit.core``."""
        first, _, rest = self.distribution.partition("-")
        return f"{first}.{rest.replace('-', '_')}"

    @property
    def readme(self) -> Path:
        return self.path / "README.md"

    @cache  # noqa: B019 - a source keeps its tree
    def sources(self) -> list[Source]:
        src = self.path / "src"
        return [Source(path, _module_name(path.relative_to(src))) for path in sorted(src.rglob("*.py"))]


@cache
def packages() -> list[Package]:
    return [Package(path.parent) for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))]


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
