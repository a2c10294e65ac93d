"""Knowledge about a checkpoint's model: shapes of its parameters and buffers, and how it is wrapped.

Rank files do not contain it. Reading LOCAL files needs the shapes; writing them needs the wrapping.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of
from shardkit.core.checkpoint.stored import Checkpoint
from shardkit.legacy_fsdp_compat.flat_layout import FLAT_NAME, FlatLayout, aligned_numel

Shapes = Mapping[str, tuple[int, ...] | str]
"""Name -> shape of every parameter and buffer of the model, in order; for a tied one the name that comes first."""

_SHOWN = 5


@dataclass(frozen=True)
class ModelShapes:
    """Shapes with ties told apart."""

    own: dict[str, tuple[int, ...]]  # name -> shape, in order of the model; for tied parameters the first name
    ties: dict[str, str]  # other names of tied parameters -> the first one
    given: Shapes  # both, in order of the model

    @classmethod
    def of(cls, shapes: Shapes) -> ModelShapes:
        """Reads shapes as a user gives them. Raises CheckpointError for a tie to a missing name, or for shapes that are
        not numbers.
        """
        own = {name: shape for name, shape in shapes.items() if not isinstance(shape, str)}
        ties = {name: first for name, first in shapes.items() if isinstance(first, str)}
        for name, shape in own.items():
            if not isinstance(shape, tuple | list) or any(type(size) is not int or size < 0 for size in shape):
                raise CheckpointError(
                    f"the shape of '{name}' is {shape!r}; write a list of whole numbers, such as [4, 3]"
                )
        for name, first in ties.items():
            if first not in own:
                raise CheckpointError(f"'{name}' is tied to '{first}', which is not among the shapes; add it")
        return cls({name: tuple(shape) for name, shape in own.items()}, ties, dict(shapes))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter or buffer, under any of its names."""
        return self.own[self.ties.get(name, name)]


def check_shapes(checkpoint: Checkpoint, shapes: ModelShapes) -> None:
    """Compares each model in a checkpoint (there may be an "ema" beside it) with the shapes. Raises CheckpointError for
    names that one of them lacks, and for different shapes.
    """
    models: dict[LeafPath, dict[str, tuple[int, ...]]] = {}
    for path in checkpoint.tensors:
        if path[-1] in shapes.given:
            models.setdefault(path[:-1], {})
    for path, stored in checkpoint.tensors.items():
        if path[:-1] in models:
            models[path[:-1]][str(path[-1])] = stored.shape
    if not models:
        raise CheckpointError(
            f"none of the {len(shapes.own)} names of the shapes ({_some(list(shapes.own))}) is in "
            f"{_some(checkpoint.files)}; it has {_some([name_of(path) for path in checkpoint.tensors])}. "
            "Give the shapes of the model that was saved"
        )
    for base, found in models.items():
        where = f"below '{name_of(base)}'" if base else "at its top"
        unknown = [name for name in found if name not in shapes.given]
        missing = [name for name in [*shapes.own, *shapes.ties] if name not in found]
        misfits = [
            f"'{name}' has {shape}, expected {shapes.shape(name)}"
            for name, shape in found.items()
            if name in shapes.given and shape != shapes.shape(name)
        ]
        if unknown or missing or misfits:
            raise CheckpointError(
                f"{_some(checkpoint.files)}: the checkpoint does not fit the shapes {where}: {len(unknown)} unknown "
                f"names ({_some(unknown)}), {len(missing)} missing ({_some(missing)}), {len(misfits)} other shapes "
                f"({_some(misfits)}). Give the shapes of the model that was saved"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


ParamDtypes = tuple[str | None, ...]
"""`param_dtype` of a unit's mixed precision, which parameters are aligned by; None is none. Several where the file that
it was found out from fits them all."""


@dataclass(frozen=True)
class Wrapping:
    """A model's FSDP modules, and its parameters and buffers.

    Attributes:
        shapes: name -> shape of every parameter and buffer, in order of the model; for a tied one, its first name.
        units: name of each FSDP module that has parameters ("" is the model itself) -> its `param_dtype`.
        buffers: names that are not sharded: buffers, and ignored parameters.
        use_orig_params: FSDP1's flag.

    Raises:
        CheckpointError: for invalid shapes, and for parameters in no unit or tied across units.
    """

    shapes: Shapes
    units: Mapping[str, ParamDtypes]
    buffers: frozenset[str]
    use_orig_params: bool

    def __post_init__(self) -> None:
        units = {name: self.unit_of(name) for name in self.parameters}
        for name, first in self.known.ties.items():
            if name in units and units.get(first) != units[name]:
                raise CheckpointError(
                    f"'{name}' is tied to '{first}' of another FSDP module, each of which has a copy of it in FSDP1; "
                    "wrap both in one, or give it a shape of its own"
                )

    @cached_property
    def known(self) -> ModelShapes:
        """The shapes, with ties told apart."""
        return ModelShapes.of(self.shapes)

    @property
    def parameters(self) -> list[str]:
        """Names of the sharded parameters, including tied ones."""
        return [name for name in self.shapes if name not in self.buffers]

    def around(self, name: str) -> list[str]:
        """The FSDP modules around a parameter or buffer, outermost first."""
        return [module for module in _modules_around(name) if module in self.units]

    def unit_of(self, name: str) -> str:
        """The innermost FSDP module around a parameter."""
        around = self.around(name)
        if not around:
            raise CheckpointError(
                f"'{name}' lies in none of the FSDP modules {list(self.units)}; name the one that it is in ('' is the "
                "model itself), or list it among the buffers"
            )
        return around[-1]

    @cached_property
    def members(self) -> dict[str, list[str]]:
        """Each unit's own parameters, in the order of its flat parameter."""
        found: dict[str, list[str]] = {unit: [] for unit in self.units}
        for name in self.parameters:
            if name in self.known.own:
                found[self.unit_of(name)].append(name)
        return found

    def layout(self, unit: str, count: int, dtype: torch.dtype) -> FlatLayout:
        """The flat parameter of a unit of `dtype` over `count` ranks.

        Raises:
            CheckpointError: if the `param_dtype` is not known well enough.
        """
        shapes = tuple(self.known.own[name] for name in self.members[unit])
        layouts = [
            FlatLayout(shapes, count, alignment_of(name, dtype) if self.use_orig_params else 1)
            for name in self.units[unit]
        ]
        if any((one.intervals, one.numel) != (layouts[0].intervals, layouts[0].numel) for one in layouts):
            raise CheckpointError(
                f"the FSDP module '{unit}' may have had one of the param_dtypes {list(self.units[unit])}, by which "
                f"parameters lie differently over {count} ranks: say in --config which it is"
            )
        return layouts[0]

    def entries(self) -> list[tuple[str, str | None]]:
        """The keys of a LOCAL state dict in stock's order; keys of flat parameters come with their unit. They precede
        the other keys of their module; with use_orig_params=True they follow them.
        """
        last = {unit: name for name in self.shapes for unit in self.around(name)}
        found: dict[str, str | None] = {}
        for name in self.shapes:
            if not self.use_orig_params:
                found.update({flat_key(unit): unit for unit in self.around(name)})
            if self.use_orig_params or name in self.buffers:
                found[name] = None
            if self.use_orig_params:
                found.update({flat_key(unit): unit for unit in reversed(self.around(name)) if last[unit] == name})
        return list(found.items())

    def as_config(self) -> dict[str, Any]:
        """The configuration that `wrapping_of_config` reads."""
        return {
            "use_orig_params": self.use_orig_params,
            "units": {unit: names[0] if len(names) == 1 else list(names) for unit, names in self.units.items()},
            "buffers": [name for name in self.shapes if name in self.buffers],
            "shapes": {name: one if isinstance(one, str) else list(one) for name, one in self.shapes.items()},
        }


def flat_key(unit: str) -> str:
    return f"{unit}.{FLAT_NAME}" if unit else FLAT_NAME


def _modules_around(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts))]


def alignment_of(param_dtype: object, dtype: torch.dtype) -> int:
    """The alignment, in elements, of parameters of `dtype` under a `param_dtype`: a name, or None."""
    found = dtype if param_dtype is None else getattr(torch, str(param_dtype), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"param_dtype {param_dtype!r} is not a dtype of torch, such as 'bfloat16'; write null for none"
        )
    return aligned_numel(found.itemsize)


def wrapping_of_file(path: Path) -> Wrapping:
    """The wrapping in a JSON configuration, or in the `migration.json` of a conversion from LOCAL files.

        {
            "use_orig_params": true,
            "units": {"": null, "layers.*": "bfloat16"},
            "buffers": ["rotary.frequencies"],
            "shapes": {"embedding.weight": [100, 16], "head.weight": "embedding.weight", ...}
        }

    Names of units may contain "*" for a part between dots. Their values are the `param_dtype` of mixed precision.
    Shapes are in order of the model; a tied parameter has the name that comes first as its shape.

    Raises:
        CheckpointError: for anything else.
    """
    return wrapping_of_config(json_of(path), path)


def shapes_of_config(path: Path) -> tuple[Shapes, list[str]]:
    """The shapes in a configuration, and which names are parameters. Works without units, even where FSDP1 does not
    support them. Raises CheckpointError if it is not a configuration.
    """
    shapes, _, buffers, _ = _parts(json_of(path), path)
    return shapes, [name for name in shapes if name not in buffers]


def json_of(path: Path) -> Any:
    """The value in a JSON file. Raises CheckpointError for anything else."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}; check the path and its permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}; correct the file") from error


def wrapping_of_config(config: Any, file: Path) -> Wrapping:
    """As `wrapping_of_file`, from Python values; `file` is for messages."""
    shapes, units, buffers, use_orig_params = _parts(config, file)
    try:
        return with_members(Wrapping(shapes, _expanded(file, units, shapes), buffers, use_orig_params))
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _parts(config: Any, file: Path) -> tuple[Shapes, dict[str, Any], frozenset[str], bool]:
    """Shapes, units, buffers and use_orig_params of a configuration."""
    try:
        found = config.get("config", config)
        units, shapes = dict(found["units"]), dict(found["shapes"])
        flag, buffers = found["use_orig_params"], frozenset(found.get("buffers", []))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a configuration: {error!r}; expected use_orig_params, units (name -> param_dtype or null), "
            "shapes, and perhaps buffers"
        ) from error
    if not isinstance(flag, bool):
        raise CheckpointError(f"{file}: use_orig_params is {flag!r}, expected true or false")
    unknown = sorted(map(str, buffers - shapes.keys()))
    if unknown:
        raise CheckpointError(f"{file} lists the buffers {unknown}, which have no shapes; add these")
    shapes = {name: tuple(one) if isinstance(one, list) else one for name, one in shapes.items()}
    odd = [one for one in (*shapes, *units, *buffers) if not isinstance(one, str)]
    if odd:
        raise CheckpointError(f"{file} has {odd[0]!r} where a name should be; write the name as a string")
    return shapes, units, buffers, flag


def _expanded(path: Path, units: Mapping[str, Any], names: Iterable[str]) -> dict[str, ParamDtypes]:
    modules = dict.fromkeys(module for name in names for module in _modules_around(name))
    found: dict[str, ParamDtypes] = {}
    for pattern, given in units.items():
        wanted = pattern.split(".")
        matching = [
            module
            for module in modules
            if module.count(".") + 1 == len(wanted) and all(map(fnmatch.fnmatchcase, module.split("."), wanted))
        ]
        if not matching:
            raise CheckpointError(
                f"{path}: no name of the shapes lies in an FSDP module '{pattern}'; correct the pattern"
            )
        dtypes = tuple(given) if isinstance(given, list) and given else (given,)
        for name in dtypes:
            alignment_of(name, torch.float32)
        found.update(dict.fromkeys(matching, dtypes))
    return {module: found[module] for module in modules if module in found}


def with_members(wrapping: Wrapping) -> Wrapping:
    """Drops FSDP modules whose parameters all lie in inner ones: they have no flat parameter. Raises CheckpointError if
    none is left.
    """
    units = {unit: wrapping.units[unit] for unit, names in wrapping.members.items() if names}
    if not units:
        raise CheckpointError(
            f"no FSDP module has parameters: all {len(wrapping.buffers)} names are of buffers or ignored parameters; "
            "list buffers only there"
        )
    return replace(wrapping, units=units)
