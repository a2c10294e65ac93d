"""What is known of the model whose checkpoint is read: shapes of its parameters and buffers, and which are tied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of
from shardkit.core.checkpoint.stored import Checkpoint

__all__ = ["ModelShapes", "Shapes", "check_shapes"]

Shapes = Mapping[str, tuple[int, ...] | str]
"""Name -> shape of every parameter and buffer of the model, in order; for a tied one the name that comes first."""

_SHOWN = 5


@dataclass(frozen=True)
class ModelShapes:
    """Shapes with ties told apart.

    Attributes:
        own: name -> shape, in order of the model; of tied parameters the first.
        ties: further names of tied parameters -> the first one.
        given: both, in order of the model.
    """

    own: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    given: Shapes

    @classmethod
    def of(cls, shapes: Shapes) -> ModelShapes:
        """Reads shapes as a user gives them.

        Raises:
            CheckpointError: for a tie to a name that is not there, and shapes that are no numbers.
        """
        own = {name: shape for name, shape in shapes.items() if not isinstance(shape, str)}
        ties = {name: first for name, first in shapes.items() if isinstance(first, str)}
        for name, shape in own.items():
            if not isinstance(shape, tuple | list) or any(type(size) is not int or size < 0 for size in shape):
                raise CheckpointError(f"the shape of '{name}' is {shape!r}, expected a list of numbers")
        for name, first in ties.items():
            if first not in own:
                raise CheckpointError(f"'{name}' is tied to '{first}', which is not among the shapes")
        return cls({name: tuple(shape) for name, shape in own.items()}, ties, dict(shapes))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter or buffer, under any of its names."""
        return self.own[self.ties.get(name, name)]

    @property
    def names(self) -> set[str]:
        """Every name, also those of tied parameters."""
        return set(self.given)


def check_shapes(checkpoint: Checkpoint, shapes: ModelShapes) -> None:
    """Compares each model in a checkpoint (there may be an "ema" beside it) with the shapes.

    Raises:
        CheckpointError: for names that one of both lacks, and for other shapes.
    """
    models: dict[LeafPath, dict[str, tuple[int, ...]]] = {}
    for path in checkpoint.tensors:
        if path[-1] in shapes.names:
            models.setdefault(path[:-1], {})
    for path, stored in checkpoint.tensors.items():
        if path[:-1] in models:
            models[path[:-1]][str(path[-1])] = stored.shape
    if not models:
        raise CheckpointError(
            f"none of the {len(shapes.own)} names of the shapes ({_some(list(shapes.own))}) is in the checkpoint; it "
            f"has {_some([name_of(path) for path in checkpoint.tensors])}"
        )
    for base, found in models.items():
        where = f"below '{name_of(base)}'" if base else "at its top"
        unknown = [name for name in found if name not in shapes.names]
        missing = [name for name in [*shapes.own, *shapes.ties] if name not in found]
        misfits = [
            f"'{name}' has {shape}, expected {shapes.shape(name)}"
            for name, shape in found.items()
            if name in shapes.names and shape != shapes.shape(name)
        ]
        if unknown or missing or misfits:
            raise CheckpointError(
                f"the checkpoint does not fit the shapes {where}: {len(unknown)} unknown names ({_some(unknown)}), "
                f"{len(missing)} missing ({_some(missing)}), {len(misfits)} other shapes ({_some(misfits)})"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
