"""FSDP1's mixed precision on top of core's: inputs, buffers, full precision in eval, low-precision gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core import MixedPrecisionPolicy
from shardkit.core.engine.step import FSDPState
from shardkit.core.tensors import cast_floating
from shardkit.core.torch_compat import like_dtensor, local_of
from shardkit.legacy_fsdp_compat.api import MixedPrecision
from shardkit.legacy_fsdp_compat.deferred_init import own_modules
from shardkit.legacy_fsdp_compat.ignored import Ignored
from shardkit.legacy_fsdp_compat.torch_compat import allow_any_grad_dtype
from shardkit.legacy_fsdp_compat.units import Unit, clean_name

__all__ = ["UnitPrecision", "core_policy"]

_FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"


def core_policy(mixed: MixedPrecision | None) -> MixedPrecisionPolicy:
    """Core's policy for gather and reduction. Inputs are cast here, because by default only the root's are cast."""
    if mixed is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    # Spelled out, because core's default follows FSDP2, which since torch 2.15 reduces in the original dtype.
    return MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype or mixed.param_dtype, None, False)


class UnitPrecision:
    """The dtypes of one unit, which change with its mode.

    Args:
        wrapped: the wrapped module; its buffers down to other units belong to this unit.
        mixed: the configuration, None for full precision.
        ignored: modules whose buffers are not cast.
        is_wrapped: whether a module is an FSDP module.
    """

    def __init__(
        self,
        wrapped: nn.Module,
        mixed: MixedPrecision | None,
        ignored: Ignored,
        is_wrapped: Callable[[nn.Module], bool],
    ) -> None:
        self.mixed = mixed or MixedPrecision()
        self.full_in_eval = os.environ.get(_FULL_PRECISION_IN_EVAL, "") == "1"
        self._is_full = False
        self._buffers: list[tuple[nn.Module, str, str, torch.dtype]] = []
        for prefix, module in own_modules(wrapped, ignored, is_wrapped):
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and buffer not in ignored.buffers:
                    fqn = clean_name(f"{prefix}.{name}" if prefix else name)
                    self._buffers.append((module, name, fqn, buffer.dtype))

    def keep_low_precision_gradients(self, unit: Unit, is_sharded: bool) -> None:
        """Casts delivered gradients to the dtype of the computation, or with NO_SHARD to that of the reduction."""
        dtype = self.mixed.param_dtype
        if not is_sharded:
            dtype = self.mixed.reduce_dtype or dtype
        if not self.mixed.keep_low_precision_grads or dtype is None:
            return

        def lower(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None and gradient.is_floating_point() and gradient.dtype != dtype:
                parameter.grad = None
                parameter.grad = like_dtensor(local_of(gradient).to(dtype), cast(DTensor, parameter))

        for one in unit.parameters:
            allow_any_grad_dtype(one.sharded)
            one.sharded.register_post_accumulate_grad_hook(lower)

    def enter(self, state: FSDPState, training: bool) -> None:
        """Before forward: sets the dtypes of parameters and buffers according to the mode."""
        full = self.full_in_eval and not training
        if full != self._is_full:
            self._is_full = full
            policy = MixedPrecisionPolicy(cast_forward_inputs=False) if full else core_policy(self.mixed)
            for group in state.groups:
                group.set_mixed_precision(policy)
        for module, name, _, original in self._buffers:
            wanted = original if full or self.mixed.buffer_dtype is None else self.mixed.buffer_dtype
            buffer = module._buffers.get(name)
            if self.mixed.buffer_dtype is not None and buffer is not None and buffer.dtype != wanted:
                buffer.data = buffer.data.to(wanted)

    def cast_inputs(self, is_root: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs of forward, cast to `param_dtype` if this unit casts them."""
        wanted = self.mixed.cast_root_forward_inputs if is_root else self.mixed.cast_forward_inputs
        dtype = self.mixed.param_dtype
        if dtype is None or not wanted or self._is_full:
            return args, kwargs
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def original_buffer_dtypes(self) -> dict[str, torch.dtype]:
        """Name relative to the wrapped module -> dtype before any cast, for the buffers that are cast."""
        if self.mixed.buffer_dtype is None:
            return {}
        return {fqn: dtype for _, _, fqn, dtype in self._buffers}
