"""Inputs and outputs of a forward that runs under transforms of `torch.func`, such as grad, jvp and vmap.

Note [Transforms]
A transform wraps its tensors, and each nested transform has its own graph. Parameters are gathered, freed and reduced
outside of all transforms (`torch_compat.outside_transforms`), because none of them wraps a parameter. A hook on a
tensor is called for the graph of only one transform, and `requires_grad` refers to that one. So inputs and outputs go
through `Watch` instead, which is in the graph of each transform that takes a gradient, and of a backward outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardkit.core.tensors import map_tensors, tensors_in


def watch_together(value: Any, on_backward: Callable[[], None]) -> Any:
    """`value` with tensors whose backward calls `on_backward` once, when all their gradients are done."""
    unique = {id(tensor): tensor for tensor in tensors_in(value) if tensor.is_floating_point() or tensor.is_complex()}
    if not unique:
        return value
    watched = dict(zip(unique, Watch.apply(on_backward, *unique.values()), strict=True))  # type: ignore[no-untyped-call]
    return map_tensors(lambda tensor: watched.get(id(tensor), tensor), value)


class Watch(torch.autograd.Function):
    """The identity. Its backward calls a function first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(on_backward: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.on_backward = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.on_backward()
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> Any:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)
