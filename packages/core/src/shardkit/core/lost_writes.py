"""Finds writes that would be lost.

Note [Writes that would be lost]
`tensor.data = other` puts other storage under a tensor. A DTensor keeps its values in its local tensor, which does not
change, and an unsharded parameter is gathered into the storage that it was made over. Either way the write is lost, or
the parameter computes with it for ever. So the storage of these tensors is remembered: that of a DTensor has no memory,
but an identity. Another storage is an error, for parameters at the next gather, for gradients at the optimizer's step.
A write that is undone before, as where weights are swapped to save others, does no harm.
"""

from __future__ import annotations

import torch

__all__ = ["GradientOrigin", "lost_gradient", "lost_parameter", "lost_while_unsharded"]

_MARK = "_shardkit_origin"


class GradientOrigin:
    """A gradient and the storage that it was made over.

    The gradient carries its own id as a mark: a weak reference would keep `module.to()` from swapping its insides, and
    the id of one that is gone may come again. A copy of the gradient has another id, one with other insides no mark.
    """

    def __init__(self, gradient: torch.Tensor) -> None:
        gradient.__dict__[_MARK] = id(gradient)
        self._storage = gradient.untyped_storage()

    def lost(self, gradient: torch.Tensor) -> bool:
        """Whether `gradient` is the one of this origin, with other storage under it."""
        return gradient.untyped_storage() is not self._storage and gradient.__dict__.get(_MARK) == id(gradient)


def lost_parameter(fqn: str) -> RuntimeError:
    """The error for a sharded parameter."""
    return RuntimeError(
        f"the data of parameter '{fqn}' was replaced (`parameter.data = ...`). The values of a DTensor lie in its "
        "local tensor, so the new ones would be lost. Write in place under torch.no_grad(): `parameter.copy_(...)` "
        "from a DTensor like it, or `parameter.to_local().copy_(...)` from this rank's rows"
    )


def lost_while_unsharded(fqn: str) -> RuntimeError:
    """The error for a parameter that was written to in its unsharded form."""
    return RuntimeError(
        f"the data of parameter '{fqn}' was replaced (`parameter.data = ...`) while it was unsharded. That does not "
        "reach its shards, so the new values are lost. Write to the sharded parameter, in place, before forward or "
        "after backward"
    )


def lost_gradient(fqn: str) -> RuntimeError:
    """The error for the gradient of a sharded parameter."""
    return RuntimeError(
        f"the data of the gradient of parameter '{fqn}' was replaced (`parameter.grad.data = ...`). The values of this "
        "DTensor lie in its local tensor, so the new ones would be lost. Write in place, or assign `parameter.grad = "
        "...`, a DTensor like it"
    )
