"""`--model MODULE:FUNCTION`: the user's function that builds a model, perhaps with the arguments of FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.users_code import import_named
from shardkit.legacy_fsdp_compat.migrate.model_wrapping import shapes_of_module, users_code

__all__ = ["model_of", "shapes_of_model"]

_EXPECTED = "expected a torch.nn.Module, or a pair of one and a dict with the arguments of FullyShardedDataParallel"


def model_of(factory: str) -> tuple[nn.Module, dict[str, Any] | None]:
    """The model that `module:function` builds, and the arguments of FSDP that it returns beside it, perhaps none; None
    if it returns the model alone. It is called on the meta device, so nothing is allocated.

    Raises:
        CheckpointError: if that cannot be imported, raises, or gives no module.
    """
    option = f"--model {factory}"
    build = _function(factory, option)
    hint = (
        "it is called without arguments on the meta device, where tensors have no values: it should build the model "
        "and load, move and wrap nothing"
    )
    with users_code(option, hint), torch.device("meta"):
        built = build()
    paired = isinstance(built, tuple) and len(built) == 2
    model, arguments = built if paired else (built, {})
    if not isinstance(model, nn.Module) or not isinstance(arguments, dict):
        seen = (
            f"a tuple of {', '.join(type(one).__name__ for one in built)}"
            if isinstance(built, tuple)
            else _described(built)
        )
        raise CheckpointError(f"{option} returned {seen}, {_EXPECTED}")
    return model, arguments if paired else None


def _function(factory: str, option: str) -> Callable[[], Any]:
    build = import_named(factory, option, "a function that builds a model", CheckpointError)
    if not callable(build) or isinstance(build, nn.Module):
        raise CheckpointError(f"{option} is {_described(build)}, expected a function that returns a torch.nn.Module")
    function: Callable[[], Any] = build
    return function


def _described(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"something of type {type(value).__name__}"


def shapes_of_model(factory: str | nn.Module) -> dict[str, tuple[int, ...] | str]:
    """Shapes of the parameters and buffers of a model, or of what `model_of` builds; of a tied one its first name."""
    return shapes_of_module(model_of(factory)[0] if isinstance(factory, str) else factory)
