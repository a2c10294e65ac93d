"""Gradients of one parameter: their dtypes, hooks on them, and changes by users that would lose one.

Note [Three dtypes of a gradient]
Autograd leaves an unsharded gradient in the dtype of the computation. It is *summed*, over backwards without gradient
sync and over ranks (first over axes of tensor parallelism), in `reduce_dtype`. If that is None, the installed torch's
FSDP2 is the model: since 2.15 the parameter's `grad_dtype` decides, by default its own dtype; before, the dtype of the
computation. A sum is *delivered* in the sharded parameter's `grad_dtype`. A `grad_dtype` of None accepts any dtype.

Note [Gradient hooks]
Autograd never reaches a sharded parameter, so the code that stores the sum over ranks runs its hooks: those of
`register_hook` on the sum before it is added, those of `register_post_accumulate_grad_hook` afterwards. They see
DTensors, once for each reduction. Hooks on the original from before `fully_shard` become hooks of the sharded
parameter. An original that is still used in computation (in a list of weights, a view made in `__init__`, a closure)
would receive the sharded parameter's gradient, and never change. It gets a hook that raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.policies import MixedPrecisionPolicy
from shardkit.core.torch_compat import (
    GRAD_DTYPE_DECIDES,
    grad_dtype_of,
    gradient_hooks,
    has_gradient_hooks,
    move_hooks,
    wraps_tensors,
)

MARK = "_shardkit_origin"
"""An attribute of the storage of a sharded parameter, and of a delivered gradient and its storage: the tensor's id. A
weak reference would prevent `module.to()` from swapping its contents; one from elsewhere would keep the storage, a few
bytes between freed blocks of memory, and the C library could not merge those."""


@dataclass(frozen=True)
class Dtypes:
    """All dtypes of one parameter but its shard's: they follow from that, the policy and the user's `grad_dtype`.

    Attributes:
        compute: of gathers and of the unsharded parameter.
        sums: of sums of gradients; None: as they are.
        delivered: of the sharded gradient; None: as sums.
        chosen: has the `grad_dtype` that the user has set, which may be None; it is empty if the user has not.
    """

    policy: MixedPrecisionPolicy
    compute: torch.dtype = torch.float32
    sums: torch.dtype | None = None
    delivered: torch.dtype | None = None
    chosen: tuple[torch.dtype | None, ...] = ()

    def decided(self, parameter: torch.Tensor, shard: torch.dtype) -> Dtypes:
        """The dtypes for `parameter`, with its `grad_dtype`, and a shard of this dtype.

        If it has none, the user's choice before stays: casts, moves and assigning loads replace parameters without it.
        """
        is_set, dtype = grad_dtype_of(parameter)
        chosen = (dtype,) if is_set else self.chosen
        policy = self.policy if shard.is_floating_point else MixedPrecisionPolicy()  # no cast drops imaginary parts
        delivered = chosen[0] if chosen else shard
        sums = policy.reduce_dtype or (delivered if chosen or GRAD_DTYPE_DECIDES else None)
        return Dtypes(self.policy, policy.param_dtype or shard, sums, delivered, chosen)

    def put_on(self, sharded: torch.Tensor) -> None:
        """Sets the user's choice on the sharded parameter: torch drops it in casts and moves."""
        if self.chosen:
            (sharded.grad_dtype,) = self.chosen

    def prepare(self, unsharded: torch.Tensor, *, sums_elsewhere: bool) -> bool:
        """Tells autograd to leave gradients of a new unsharded parameter in the dtype of sums. Returns `may_defer`.

        `sums_elsewhere`: whether they may be summed over axes that are not data-parallel before.
        """
        sums = self.sums
        asked = GRAD_DTYPE_DECIDES or bool(self.chosen) or (sums_elsewhere and sums is not None)
        if not asked or not unsharded.dtype.is_floating_point or sums == unsharded.dtype:
            return False
        unsharded.grad_dtype = sums
        return sums is not None and sums.itemsize > unsharded.itemsize and not sums_elsewhere


def move_gradient_hooks(original: torch.Tensor, sharded: torch.Tensor, name: Callable[[], str]) -> None:
    """Moves the hooks of `original` to `sharded`; a gradient that still reaches `original` raises with its `name()`."""
    if has_gradient_hooks(original):
        requires_grad = sharded.requires_grad
        sharded.requires_grad_()  # it may have been frozen since
        move_hooks(original, sharded)
        sharded.requires_grad_(requires_grad)
    if original.is_leaf and original.requires_grad and not wraps_tensors(original):

        def refuse(original: torch.Tensor) -> NoReturn:
            original.grad = None
            raise RuntimeError(
                f"backward reached the plain tensor that was parameter '{name()}' before fully_shard: some module, "
                "list, view or closure still computes with it, although it is not trained any more. Read the parameter "
                "from its module in forward, or call fully_shard before you keep it elsewhere"
            )

        original.register_post_accumulate_grad_hook(refuse)


def hooked(fqn: str, gradient: DTensor, sharded: torch.Tensor) -> DTensor:
    """The gradient after the hooks of `sharded`."""
    for hook in gradient_hooks(sharded):
        found = hook(gradient)
        if found is None:
            continue
        if not isinstance(found, DTensor) or found.placements != gradient.placements or found.shape != gradient.shape:
            raise RuntimeError(
                f"a gradient hook of parameter '{fqn}' returned {type(found).__name__} of shape {tuple(found.shape)}; "
                f"expected a DTensor of shape {tuple(gradient.shape)} with placements {tuple(gradient.placements)}, "
                "like the gradient that it gets"
            )
        gradient = cast(DTensor, found.detach())
    return gradient


def check_gradients(params: Iterable[Any]) -> None:
    """Raises RuntimeError if other storage was put under the gradient of one of `params` since it was marked.

    A copy of a marked gradient has another id; a gradient with swapped contents has no mark.
    """
    for param in params:
        gradient = param.sharded_param.grad
        if gradient is None or gradient.__dict__.get(MARK) != id(gradient):
            continue
        if gradient.untyped_storage().__dict__.get(MARK) != id(gradient):
            raise RuntimeError(
                f"the data of the gradient of parameter '{param.fqn}' was replaced (`parameter.grad.data = ...`). The "
                "values of this DTensor lie in its local tensor, so the new ones would be lost. Write in place, or "
                "assign `parameter.grad = ...`, a DTensor like it"
            )


def refuse_gradient(fqn: str, gradient: torch.Tensor) -> None:
    """A hook for an unsharded parameter that has been superseded: its gradient would be lost."""
    raise RuntimeError(
        f"parameter '{fqn}' was cast, moved or replaced between the forward and the backward that reached it now, so "
        f"its gradient {tuple(gradient.shape)} would be lost. Do that before forward or after backward"
    )
