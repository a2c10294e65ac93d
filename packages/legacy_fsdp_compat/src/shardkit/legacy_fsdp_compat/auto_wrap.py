"""Applies a wrap policy: makes FSDP units of the modules below a module that is being wrapped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardkit.core.tensors import cast_floating
from shardkit.legacy_fsdp_compat.api import MixedPrecision
from shardkit.legacy_fsdp_compat.wrap import Policy

__all__ = ["CHOOSE", "auto_wrap"]

CHOOSE = ("choose", "_run_policy")
"""Method names of policies that see the whole model at once, which are not callable; stock uses the second."""

Wrapper = Callable[..., nn.Module]


def auto_wrap(
    root: nn.Module,
    policy: Policy | Callable[..., bool],
    ignored_modules: set[nn.Module],
    ignored_parameters: set[nn.Parameter],
    arguments: dict[str, Any],
    wrapper: Wrapper,
    is_wrapped: Callable[[nn.Module], bool],
) -> None:
    """Replaces modules below `root` by `wrapper(module, **arguments)`, as the policy says. Never `root` itself.

    Raises:
        ValueError: if the model already holds FSDP modules, or a unit has frozen and trainable parameters and
            `use_orig_params=False`.
    """
    for name, module in root.named_modules():
        if is_wrapped(module):
            raise ValueError(
                f"auto_wrap_policy was passed, but '{name}' is an FSDP module already; wrap by hand or by policy"
            )
    mixed: MixedPrecision | None = arguments["mixed_precision"]
    exempt = _exempt_from_mixed_precision(root, mixed, ignored_modules)
    choose = next((getattr(policy, name) for name in CHOOSE if hasattr(policy, name)), None)
    if choose is not None:
        chosen = choose(root, ignored_modules, arguments)
        for module in exempt:
            chosen[module] = {**chosen.get(module, arguments), "mixed_precision": None}
        chosen.pop(root, None)
        _wrap_below(root, chosen, wrapper, {})
        return
    _Recursion(policy, exempt, ignored_modules, ignored_parameters, arguments, wrapper).below(root)


def _wrap_below(
    parent: nn.Module, chosen: dict[nn.Module, Any], wrapper: Wrapper, done: dict[nn.Module, nn.Module]
) -> None:
    """Wraps children before parents; a module that is used in two places stays one module."""
    for child in parent.children():
        if child not in done:
            done[child] = child
            _wrap_below(child, chosen, wrapper, done)
            if child in chosen:
                done[child] = wrapper(child, **chosen[child])
    # named_children names a shared child once; this loop finds its other places.
    for name, held in list(parent._modules.items()):
        if held is not None and done.get(held, held) is not held:
            setattr(parent, name, done[held])


class _Recursion:
    """The rule for function policies: from the leaves up, each is asked about the elements not yet wrapped."""

    def __init__(
        self,
        policy: Any,
        exempt: set[nn.Module],
        ignored_modules: set[nn.Module],
        ignored_parameters: set[nn.Parameter],
        arguments: dict[str, Any],
        wrapper: Wrapper,
    ) -> None:
        self._policy = policy
        self._exempt = exempt
        self._ignored_modules = ignored_modules
        self._ignored_parameters = ignored_parameters
        self._arguments = arguments
        self._wrapper = wrapper

    def _numel(self, module: nn.Module) -> int:
        return sum(one.numel() for one in module.parameters() if one not in self._ignored_parameters)

    def below(self, module: nn.Module) -> int:
        """Wraps what is below a module; returns how many elements are wrapped there."""
        if not self._policy(module=module, recurse=True, nonwrapped_numel=self._numel(module)) and not any(
            one in self._exempt for one in module.modules()
        ):
            return 0
        wrapped = 0
        for name, child in module.named_children():
            if child in self._ignored_modules:
                continue
            replaced, numel = self._one(child)
            setattr(module, name, replaced)
            wrapped += numel
        return wrapped

    def _one(self, module: nn.Module) -> tuple[nn.Module, int]:
        numel = self._numel(module)
        wrapped = self.below(module)
        if module in self._exempt:
            return self._wrapper(module, **{**self._arguments, "mixed_precision": None}), numel
        recurse = self._policy(module=module, recurse=True, nonwrapped_numel=numel)
        if recurse and self._policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            return self._wrapper(module, **self._arguments), numel
        return module, wrapped


def _exempt_from_mixed_precision(
    root: nn.Module, mixed: MixedPrecision | None, ignored_modules: set[nn.Module]
) -> set[nn.Module]:
    """Keeps modules of these classes in full precision; casts their inputs to it, and their outputs back."""
    if mixed is None:
        return set()
    classes = tuple(mixed._module_classes_to_ignore)
    exempt = {
        one for one in root.modules() if isinstance(one, classes) and one not in ignored_modules and one is not root
    }
    for module in exempt:
        module.register_forward_pre_hook(_to_full_precision, with_kwargs=True)
        module.register_forward_hook(_back_to_input_dtype)
    if exempt:
        names = sorted({type(one).__name__ for one in exempt})
        warnings.warn(
            f"mixed precision and an auto_wrap_policy were passed; modules of {names} become units of their own in "
            "full precision (see MixedPrecision._module_classes_to_ignore)",
            stacklevel=4,
        )
    return exempt


_INPUT_DTYPE = "_shardkit_input_dtype"


def _to_full_precision(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    first = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
    module.__dict__[_INPUT_DTYPE] = first.dtype if first is not None and first.is_floating_point() else None
    return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)


def _back_to_input_dtype(module: nn.Module, args: Any, output: Any) -> Any:
    dtype = module.__dict__.pop(_INPUT_DTYPE, None)
    return output if dtype is None else cast_floating(output, dtype)
