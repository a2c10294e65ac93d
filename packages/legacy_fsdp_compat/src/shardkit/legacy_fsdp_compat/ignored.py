"""Modules and parameters that the user told FSDP to ignore."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import nn

__all__ = ["Ignored", "resolve_ignored"]


class Ignored:
    """Ignored modules (with everything below them), their parameters and buffers."""

    def __init__(self, modules: set[nn.Module], parameters: set[nn.Parameter]) -> None:
        self.modules = modules
        self.parameters = parameters
        self.buffers: set[torch.Tensor] = {buffer for module in modules for buffer in module.buffers()}


def resolve_ignored(
    root: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    is_wrapped: Callable[[nn.Module], bool],
) -> Ignored:
    """Checks the arguments; adds everything below, and whatever FSDP modules below `root` already ignore.

    Raises:
        ValueError: if both arguments are passed, or the ignored states mix modules and parameters.
        TypeError: for anything that is neither a module nor a parameter, or an ignored FSDP module.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("ignored_modules and ignored_states were both given; pass ignored_modules or ignored_states")
    states = list(ignored_states or ())
    modules = list(ignored_modules or ())
    parameters: set[nn.Parameter] = set()
    if states and all(isinstance(one, nn.Module) for one in states):
        modules = [one for one in states if isinstance(one, nn.Module)]
    else:
        parameters = {one for one in states if isinstance(one, nn.Parameter)}
    if not modules and len(parameters) != len({id(one) for one in states}):
        kinds = sorted({type(one).__name__ for one in states})
        raise ValueError(f"ignored_states must be all modules or all parameters, got {kinds}")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"ignored_modules must hold modules, got a {type(module).__name__}")
        if is_wrapped(module):
            raise ValueError(
                f"ignored_modules must not hold FSDP modules, got one around {type(module).__name__}; remove it"
            )
        if module is root:
            warnings.warn(
                f"the module to wrap ({type(root).__name__}) is itself ignored, so FSDP manages none of its parameters",
                stacklevel=3,
            )
    below = {one for module in modules for one in module.modules() if not is_wrapped(one)}
    parameters |= {parameter for module in below for parameter in module.parameters(recurse=False)}
    for module in root.modules():
        inherited = module.__dict__.get("_ignored")
        if is_wrapped(module) and isinstance(inherited, Ignored):
            parameters |= inherited.parameters
            below |= inherited.modules
    return Ignored(below, parameters)
