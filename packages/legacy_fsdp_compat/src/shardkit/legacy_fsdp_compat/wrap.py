"""Wrap policies, `enable_wrap` and `wrap`: the public names of `torch.distributed.fsdp.wrap`."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]


class Policy(ABC):
    """A wrap policy that sees the whole model at once."""

    @abstractmethod
    def choose(self, root: nn.Module, ignored: set[nn.Module], defaults: dict[str, Any]) -> dict[nn.Module, Any]:
        """The modules to wrap, each with the keyword arguments to wrap it with; `defaults` are those of the root."""


class ModuleWrapPolicy(Policy):
    """Wraps every module of the given classes."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = tuple(dict.fromkeys(module_classes))

    def choose(self, root: nn.Module, ignored: set[nn.Module], defaults: dict[str, Any]) -> dict[nn.Module, Any]:
        """See `Policy`."""
        chosen = (one for one in root.modules() if one not in ignored and isinstance(one, self._module_classes))
        return {module: dict(defaults) for module in chosen}

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """The same choice, in the form of function policies."""
        return recurse or isinstance(module, self._module_classes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({set(self._module_classes)})"


class CustomPolicy(Policy):
    """Wraps the modules for which a function returns True, or a dict of arguments that override the root's."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def choose(self, root: nn.Module, ignored: set[nn.Module], defaults: dict[str, Any]) -> dict[nn.Module, Any]:
        """See `Policy`. Raises ValueError for an answer that is neither a bool nor a dict."""
        chosen: dict[nn.Module, Any] = {}
        for name, module in root.named_modules():
            if module in ignored:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, bool | dict):
                raise ValueError(
                    f"the function of CustomPolicy returned {answer!r} for '{name}' ({type(module).__name__}); "
                    "expected False, True, or a dict of arguments for FSDP"
                )
            if answer:
                chosen[module] = {**defaults, **(answer if isinstance(answer, dict) else {})}
        return chosen


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wraps every submodule."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wraps the modules for which `lambda_fn` returns True."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Wraps the modules of the given classes; shared parameters should stay in the root's unit."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wraps a module once it holds at least `min_num_params` elements that are not wrapped below it.

    Args:
        module: the module in question.
        recurse: whether it is asked about the modules below `module`, or about `module` itself.
        nonwrapped_numel: elements of its parameters that are not wrapped yet.
        min_num_params: the threshold.
        force_leaf_modules: classes whose children are never wrapped; default: multi-head attention.
        exclude_wrap_modules: classes that are never wrapped; default: `ModuleList` and `ModuleDict`.
    """
    leaves = force_leaf_modules or size_based_auto_wrap_policy.FORCE_LEAF_MODULES  # type: ignore[attr-defined]
    excluded = exclude_wrap_modules or size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]
    if nonwrapped_numel < min_num_params:
        return False
    return not isinstance(module, tuple(leaves if recurse else excluded))


size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Wrapping:
    """The wrapper that `wrap` applies inside `enable_wrap`."""

    wrapper: Callable[..., nn.Module]
    arguments: dict[str, Any]


_wrapping: ContextVar[_Wrapping | None] = ContextVar("wrapping", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, `wrap(module)` applies `wrapper_cls(module, **wrapper_kwargs)`.

    Raises:
        NotImplementedError: inside another `enable_wrap`, as stock does.
    """
    if _wrapping.get() is not None:
        raise NotImplementedError("enable_wrap inside another enable_wrap; leave the outer one first")
    token = _wrapping.set(_Wrapping(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wraps `module` inside `enable_wrap`; `wrap_overrides` override its arguments. Elsewhere returns `module`."""
    active = _wrapping.get()
    return module if active is None else active.wrapper(module, **{**active.arguments, **wrap_overrides})
