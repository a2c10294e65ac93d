"""Imports between packages and inside core only run downwards, and never in a circle (see architecture.md)."""

import sys
from graphlib import TopologicalSorter

import pytest

from scripts.workspace import Import, Package, Source, packages

CORE = "shardkit.core"

# From the ground up: folders, and files beside them. A module may import from its own layer and from those before it.
LAYERS: list[set[str]] = [
    {"digests", "events", "mesh", "observers", "policies", "stock_names", "tensors", "torch_compat", "version"},
    {"runtime"},
    {"parameters"},
    {"optimizer_steps"},
    {"engine"},
    {"fully_shard", "module", "beyond", "checkpoint", "clip", "materialize", "metrics", "optimizers", "replicas"},
    {"install"},
    {"__init__", "__main__"},
]

# Comes with shardkit-core, beside it: imports neither it nor torch.
AUTOINSTALL = "shardkit.autoinstall"
# Options of commands, of several distributions: they import neither torch nor the modules that run the commands.
COMMANDS = "shardkit.commands"

# Above core, in its distribution, for those who import it: nothing else does.
WEIGHTS = "shardkit.weights"

# import name -> the sibling packages that it may import
SIBLINGS: dict[str, set[str]] = {
    "shardkit.core": {"shardkit.autoinstall", "shardkit.commands", "shardkit.weights"},
    "shardkit.tp_adapter": {"shardkit.core"},
    "shardkit.legacy_fsdp_compat": {"shardkit.core", "shardkit.tp_adapter", "shardkit.commands"},
    "shardkit.tools": {"shardkit.core", "shardkit.autoinstall", "shardkit.commands"},
}


def layer(module: str) -> int:
    """The number of the layer that a module of core lies in."""
    part = module.removeprefix(CORE).strip(".").split(".")[0] or "__init__"
    for number, names in enumerate(LAYERS):
        if part in names:
            return number
    raise AssertionError(f"{module} lies in no layer: give it one in LAYERS, and in docs/explanation/architecture.md")


def imported_module(entry: Import, modules: set[str]) -> str | None:
    """The module of ``modules`` that an import runs, or None where it is somebody else's."""
    return next((name for name in (entry.path, entry.module) if name in modules), None)


def imports_of(sources: list[Source]) -> dict[str, set[str]]:
    """The modules that each imports. Imports for types only count: a reader follows them, too."""
    modules = {source.module for source in sources}
    return {
        source.module: {target for entry in source.imports() if (target := imported_module(entry, modules))}
        for source in sources
    }


def core() -> Package:
    return next(package for package in packages() if package.import_name == CORE)


def test_imports_run_downwards():
    beside = (AUTOINSTALL, COMMANDS, WEIGHTS)
    imports = imports_of([source for source in core().sources() if not source.module.startswith(beside)])
    upward = {module: {one for one in targets if layer(one) > layer(module)} for module, targets in imports.items()}
    assert {module: targets for module, targets in upward.items() if targets} == {}


def test_autoinstall_imports_no_torch():
    """It runs at the start of every Python process, and decides when shardkit.core is imported."""
    sources = [source for source in core().sources() if source.module.startswith(AUTOINSTALL)]
    imported = {entry.module.split(".")[0] for source in sources for entry in source.imports()}
    assert imported - set(sys.stdlib_module_names) == {"shardkit"}
    assert {entry.module for source in sources for entry in source.imports() if "shardkit" in entry.module} == {
        AUTOINSTALL
    }


def test_weights_costs_an_import_only_those_who_import_it():
    sources = [source for one in packages() for source in one.sources() if not source.module.startswith(WEIGHTS)]
    assert [source.module for source in sources for entry in source.imports() if entry.path.startswith(WEIGHTS)] == []


def test_options_of_commands_import_no_torch():
    sources = [source for one in packages() for source in one.sources() if source.module.startswith(COMMANDS)]
    imported = {entry.module for source in sources for entry in source.imports()}
    assert {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names} == {
        f"{COMMANDS}.checkpoint"
    }


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.distribution)
def test_no_import_cycle(package: Package):
    graph = {module: targets - {module} for module, targets in imports_of(package.sources()).items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.distribution)
def test_only_declared_siblings_are_imported(package: Package):
    imported = {
        ".".join(entry.module.split(".")[:2])
        for source in package.sources()
        for entry in source.imports()
        if entry.module.startswith("shardkit.")
    }
    assert imported - {package.import_name} <= SIBLINGS[package.import_name]
