"""Rules about the files of the packages: their names, their functions, and the private names that they use."""

import ast
import re
from collections.abc import Iterator

import pytest

from scripts.workspace import ROOT, Source, packages

SOURCES = [source for package in packages() for source in package.sources()]
DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc"}
MAX_FUNCTION_LINES = 80  # or a step would lead through fewer functions (test_walk.py) because they are longer
TORCH_COMPAT = "shardkit.core.torch_compat"
# Each package keeps the private names that it uses in a file of that name.
TORCH_COMPATS = {package.import_name + ".torch_compat" for package in packages()}
# Other software recognises a sharded module by stock FSDP2's public names, so torch_compat may touch those and no more.
STOCK_FSDP = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
RECOGNITION = re.compile(
    r"torch\.distributed\.fsdp(\.(FSDPModule|UnshardHandle|MixedPrecisionPolicy|CPUOffloadPolicy|OffloadPolicy|fully_shard)(\.state)?)?"
)


def torch_names(source: Source) -> Iterator[tuple[str, int]]:
    """Every name of torch that a file imports or reaches by attributes of ``torch``, with its line."""
    yield from ((entry.path, entry.line) for entry in source.imports() if entry.module.split(".")[0] == "torch")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", name := ast.unparse(node)):
            yield name, node.lineno


def test_stock_fsdp_is_not_used():
    """But for the recognition names in torch_compat."""
    assert [
        f"{source}:{line}: {name}"
        for source in SOURCES
        for name, line in torch_names(source)
        if name.startswith(STOCK_FSDP) and not (source.module == TORCH_COMPAT and RECOGNITION.fullmatch(name))
    ] == []


def test_private_names_of_torch_stand_in_torch_compat():
    assert [
        f"{source}:{line}: {name}"
        for source in SOURCES
        if source.module not in TORCH_COMPATS
        for name, line in torch_names(source)
        if re.search(r"\._(?!_)", name)
    ] == []


def test_a_file_is_one_concept():
    assert [str(source) for source in SOURCES if source.path.stem in DRAWERS] == [], "name the file after its concept"


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, text: list[str]) -> int:
    """Without its docstring, blank lines and comments."""
    documented = ast.get_docstring(function) is not None
    inside = [] if not documented else range(function.body[0].lineno, (function.body[0].end_lineno or 0) + 1)
    lines = range(function.lineno, (function.end_lineno or 0) + 1)
    code = (text[line - 1].strip() for line in lines if line not in inside)
    return sum(bool(line) and not line.startswith("#") for line in code)


def test_functions_are_short():
    found = []
    for source in SOURCES:
        text = source.path.read_text().splitlines()
        functions = (n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        found += [f"{source}:{f.lineno}: {f.name}" for f in functions if _code_lines(f, text) > MAX_FUNCTION_LINES]
    assert not found, f"at most {MAX_FUNCTION_LINES}: {found}"


def test_nothing_imports_from_a_test():
    """Code that tests share lies in a module beside them, so that a test can be read, moved and deleted by itself."""
    files = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    # Only files that may name one are parsed.
    may_name_one = re.compile(r"\.test_|^\s+test_\w+,$|import .*\btest_", re.MULTILINE)
    named = [path for path in files if may_name_one.search(path.read_text())]
    sources = [Source(path, ".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in named]
    found = [f"{source}:{entry.line}" for source in sources for entry in source.imports() if ".test_" in entry.path]
    assert found == []


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.distribution)
def test_shardkit_stays_a_namespace(package):
    assert not (package.path / "src" / "shardkit" / "__init__.py").exists()
    top = package.import_name.split(".")[1]
    directories = {path.name for path in (package.path / "src" / "shardkit").iterdir() if path.name != "__pycache__"}
    own = {top} | {"core": {"autoinstall", "commands", "weights"}, "legacy_fsdp_compat": {"commands"}}.get(top, set())
    assert directories == own, "a package brings only its own directories into the namespace"
    assert (package.path / "src" / "shardkit" / top / "py.typed").is_file()


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.distribution)
def test_license_travels_with_the_package(package):
    assert (package.path / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
