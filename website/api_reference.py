"""Pages of the public names, one for each public module, whose text mkdocstrings takes from the docstrings."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# The names that a user meets first, in this order; the others follow by name.
_FIRST = {
    "shardkit.core": (
        "fully_shard", "FSDPModule", "MixedPrecisionPolicy", "CPUOffloadPolicy", "materialize", "clip_grad_norm_",
        "full_state_dict", "load_full_state_dict", "save_full_state_dict", "optimizer_step_on_shards", "placements_for",
        "Owned", "Blocks", "CompressionPolicy", "install",
    ),
    "shardkit.core.checkpoint": ("CheckpointManager", "TrainingState", "Restored"),
    "shardkit.tools": ("profile", "estimate", "plan"),
}  # fmt: skip
_HEADINGS = {
    "shardkit.core": "Sharding, policies, clipping, full state dicts.",
    "shardkit.core.checkpoint": "Checkpoints of training runs.",
    "shardkit.core.events": "Typed events of the engine, for loggers and tools.",
    "shardkit.weights": "Weights to other processes, without a full tensor.",
    "shardkit.tp_adapter": "Fused weights, and checkpoints of models that tensor parallelism has cut.",
    "shardkit.legacy_fsdp_compat": "FSDP1's API; [case by case](../legacy_fsdp.md) it is compared with stock's.",
    "shardkit.legacy_fsdp_compat.migrate": "Conversion of FSDP1's checkpoints, from Python.",
    "shardkit.tools": "Estimates, profiles, reports and findings, from Python.",
}


@dataclass(frozen=True)
class Name:
    """One public name of a module."""

    name: str
    value: Any

    @property
    def home(self) -> str:
        """The dotted path of its definition, which has another name if it was renamed on import."""
        return f"{self.value.__module__}.{self.value.__qualname__}"


def modules() -> list[ModuleType]:
    """The public modules."""
    return [importlib.import_module(name) for name in _HEADINGS]


def public_names(module: ModuleType) -> list[Name]:
    """The names of a module that shardkit defines. Names of torch that it passes on are torch's to document."""
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if _defined_in(value, module.__name__) and not name.startswith("_")
    ]
    found = []
    for name in names:
        value = getattr(module, name)
        is_code = inspect.isclass(value) or inspect.isfunction(value)
        if is_code and value.__module__.startswith("shardkit."):
            found.append(Name(name, value))
    first = _FIRST.get(module.__name__, ())
    return sorted(found, key=lambda one: (first.index(one.name) if one.name in first else len(first), one.name.lower()))


def _defined_in(value: Any, module: str) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module


def undocumented() -> list[str]:
    """Public names, and public methods and properties of public classes, without a docstring."""
    missing = []
    for module in modules():
        for one in public_names(module):
            if not _documented(one.value):
                missing.append(f"{module.__name__}.{one.name}")
            if inspect.isclass(one.value):
                missing += [f"{module.__name__}.{one.name}.{member}" for member in _bare_members(one.value)]
    return missing


def _documented(value: Any) -> bool:
    """Whether somebody wrote a docstring: a dataclass without one gets its signature."""
    text = value.__doc__ or ""
    return bool(text.strip()) and not text.startswith(f"{value.__name__}(")


def _bare_members(owner: type) -> list[str]:
    """Public members of its own without a docstring. One that overrides a documented method inherits its text."""
    return [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and isinstance(value, property | staticmethod | classmethod | type(_bare_members))
        and not inspect.getdoc(getattr(owner, name))
    ]


def file_name(module: str) -> str:
    """The page of a module: shardkit.core.checkpoint has core_checkpoint.md."""
    return module.removeprefix("shardkit.").replace(".", "_") + ".md"


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    made = {}
    for module in modules():
        lines = [f"# {module.__name__}", "", _HEADINGS[module.__name__], ""]
        lines += [f"::: {one.home}\n" for one in public_names(module)]
        made[file_name(module.__name__)] = "\n".join(lines)
    return made
