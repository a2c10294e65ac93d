"""Communication hooks: a user's function replaces a unit's gradient reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core import ReduceScatter
from shardkit.core.engine.group import FSDPParamGroup

__all__ = ["install_hook"]


def install_hook(groups: Sequence[FSDPParamGroup], state: object, hook: Callable[..., None]) -> None:
    """Reduces the gradients of `groups` with `hook`, which does its own division.

    For sharded parameters it is `hook(state, gradient, output)`; the gradient is flat and padded, with world_size times
    the elements of `output`. For replicated parameters it is `hook(state, gradient)`, in place.
    """
    for group in groups:
        group.change(gradient_divide_factor=1.0)
        if group.mesh.shard_group is not None:
            hooked = _HookedReduceScatter(state, hook)
            group.change(communication=group.settings.communication.through(group.label, reduce_scatter=hooked))
        elif group.mesh.shard_axis is None and not _is_scalar_companion(group, groups):
            group.change(native_all_reduce=False, all_reduce_hook=lambda gradient: _call(hook, state, gradient))
        else:
            group.change(gradient_divide_factor=None)


def _is_scalar_companion(group: FSDPParamGroup, groups: Sequence[FSDPParamGroup]) -> bool:
    """Whether a group holds 0-dim parameters beside sharded ones, which core reduces: a hook cannot."""
    return any(other.mesh.shard_group is not None for other in groups if other is not group)


class _HookedReduceScatter(ReduceScatter):
    def __init__(self, state: object, hook: Callable[..., None]) -> None:
        self._state = state
        self._hook = hook

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        # Compressing hooks replace the memory of the tensors they receive (`tensor.data = ...`).
        gradient, output = input_tensor.detach(), output_tensor.detach()
        self._hook(self._state, gradient, output)
        if output.data_ptr() != output_tensor.data_ptr():
            output_tensor.copy_(output)


def _call(hook: Callable[..., None], state: Any, gradient: torch.Tensor) -> None:
    given = gradient.detach()
    hook(state, given)
    if given.data_ptr() != gradient.data_ptr():
        gradient.copy_(given)
