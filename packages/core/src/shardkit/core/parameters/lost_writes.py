"""Finds writes that would be lost.

Note [Writes that would be lost]
`tensor.data = other` puts other storage under a tensor. A DTensor keeps its values in its local tensor, which does not
change, and an unsharded parameter is gathered into its original storage. Either way the write is lost, or the parameter
keeps computing with it. So the storage of these tensors is remembered, or marked; a DTensor's storage has no memory,
but an identity. Another storage is an error: for parameters at the next gather, for gradients at the optimizer's step.
A write that is undone before that, such as a temporary swap of weights, does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = [
    "are_as_marked",
    "check_gradient",
    "check_replacement",
    "lost_parameter",
    "lost_summand",
    "lost_while_unsharded",
    "mark_gradient",
    "refuse_gradient",
]

_MARK = "_shardkit_origin"

_attributes_of = attrgetter("__dict__")


def mark_gradient(gradient: torch.Tensor) -> None:
    """Marks a gradient and its storage.

    The mark is the gradient's own id: a weak reference would prevent `module.to()` from swapping its contents. Both
    marks disappear with the gradient. A reference from elsewhere would keep the storage, a few bytes between freed
    blocks of memory, and the C library could not merge those.
    """
    gradient.__dict__[_MARK] = gradient.untyped_storage().__dict__[_MARK] = id(gradient)


def are_as_marked(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether all are marked, and over the storage they had then; if not, `check_gradient` decides on each."""
    present = [one for one in gradients if one is not None]
    marks = [*map(dict.get, map(_attributes_of, present), repeat(_MARK))]
    storages = map(_attributes_of, map(torch.Tensor.untyped_storage, present))
    return marks == [*map(id, present)] == [*map(dict.get, storages, repeat(_MARK))]


def check_gradient(fqn: str, gradient: torch.Tensor | None) -> None:
    """Raises RuntimeError if other storage was put under the gradient of parameter `fqn` since it was marked.

    A copy of a marked gradient has another id; a gradient with swapped contents has no mark.
    """
    if gradient is None or (mark := gradient.__dict__.get(_MARK)) is None or mark != id(gradient):
        return
    if gradient.untyped_storage().__dict__.get(_MARK) != mark:
        raise RuntimeError(
            f"the data of the gradient of parameter '{fqn}' was replaced (`parameter.grad.data = ...`). The values of "
            "this DTensor lie in its local tensor, so the new ones would be lost. Write in place, or assign "
            "`parameter.grad = ...`, a DTensor like it"
        )


def check_replacement(fqn: str, parameter: torch.Tensor, old: DTensor, shape: torch.Size) -> None:
    """Raises ValueError if the user's replacement of a sharded parameter cannot stand for it.

    Args:
        fqn: FQN of the parameter.
        parameter: the replacement.
        old: the sharded parameter.
        shape: shape of the whole parameter.
    """
    if not isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter '{fqn}' was replaced by a plain tensor of shape {tuple(parameter.shape)}; expected a "
            f"DTensor with placements {tuple(old.placements)}. To load a full state dict use "
            "shardkit.core.load_full_state_dict; give torch.func.functional_call DTensors like state_dict()'s"
        )
    if parameter.shape != shape or tuple(parameter.placements) != tuple(old.placements):
        raise ValueError(
            f"parameter '{fqn}' was replaced by a DTensor of shape {tuple(parameter.shape)} with placements "
            f"{tuple(parameter.placements)}; expected shape {tuple(shape)} with {tuple(old.placements)}"
        )
    seen, expected = parameter.device_mesh, old.device_mesh
    if seen is not expected and not torch.equal(seen.mesh, expected.mesh):
        raise ValueError(
            f"parameter '{fqn}' was replaced by a DTensor on {seen}; expected {expected}: the same placements "
            "on other ranks, or ranks in another order, stand for other rows. Make it like that of state_dict()"
        )
    if not isinstance(parameter, nn.Parameter) and parameter.requires_grad:
        raise ValueError(
            f"parameter '{fqn}' was replaced by a DTensor that requires grad and is not an nn.Parameter, as by "
            "torch.func.functional_call; its gradient would be lost. Pass detached tensors to compute with other "
            "values, or train with the parameters of the module"
        )


def lost_summand(fqn: str, gradient: torch.Tensor, sharded: DTensor) -> RuntimeError:
    """The error for a gradient that the user has assigned, to which a reduced one cannot be added."""
    return RuntimeError(
        f"parameter '{fqn}' was assigned a gradient with {getattr(gradient, 'placements', 'no placements')}, and a "
        f"reduced one with {tuple(sharded.placements)} cannot be added to it; assign a DTensor like the parameter"
    )


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
        f"the data of parameter '{fqn}' was replaced (`parameter.data = ...`) or written to in place while it was "
        "unsharded: in forward, or after a forward that no backward has followed. That does not reach its shards, so "
        "the new values are lost. Write to the sharded parameter, in place, before forward or after backward; "
        "reshard() the module if it is unsharded there"
    )


def refuse_gradient(fqn: str, gradient: torch.Tensor) -> None:
    """A hook for an unsharded parameter that has been superseded: its gradient would be lost.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"parameter '{fqn}' was cast, moved or replaced between the forward and the backward that reached it now, so "
        f"its gradient {tuple(gradient.shape)} would be lost. Do that before forward or after backward"
    )
