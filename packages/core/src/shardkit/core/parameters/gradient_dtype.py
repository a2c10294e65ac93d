"""The dtypes in which a parameter's gradients accumulate, are summed, and are delivered.

Note [Three dtypes of a gradient]
Autograd leaves an unsharded gradient in the dtype of the computation. It is *summed*, over backwards without gradient
sync and over ranks, in `reduce_dtype`. If that is None, the installed torch's FSDP2 is the model: since 2.15 the
parameter's `grad_dtype` decides, which is its own dtype unless it was set; before, the dtype of the computation. A sum
is *delivered* in the sharded parameter's `grad_dtype`. A `grad_dtype` of None accepts any dtype.

A gradient that is summed over axes of tensor parallelism first has the dtype of sums there too: autograd leaves it so.
"""

from __future__ import annotations

import torch

from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES, grad_dtype_of

__all__ = ["GradientDtype"]


class GradientDtype:
    """The `grad_dtype` that the user has set for one parameter, and its consequences.

    Attributes:
        sums: the dtype of sums; None for the dtype of the gradient.
        delivered: the dtype of the sharded gradient; None for the dtype of the sum.
        is_set: whether the user has.
        may_defer: whether sums are wider than the computation, so that their cast can be deferred.
    """

    def __init__(self) -> None:
        self.sums: torch.dtype | None = None
        self.delivered: torch.dtype | None = None
        self.is_set = False
        self._dtype: torch.dtype | None = None
        self._follows = False  # whether autograd has been configured
        self.may_defer = False

    def note(self, parameter: torch.Tensor) -> None:
        """Takes over the setting of `parameter`. Casts, moves and assigning loads replace parameters without it."""
        is_set, dtype = grad_dtype_of(parameter)
        if is_set:
            self.is_set, self._dtype = True, dtype

    def decide(self, reduce_dtype: torch.dtype | None, original: torch.dtype) -> None:
        """Decides on the dtypes of a parameter of dtype `original`."""
        self.delivered = self._dtype if self.is_set else original
        if reduce_dtype is not None:
            self.sums = reduce_dtype
        else:
            self.sums = self.delivered if self.is_set or GRAD_DTYPE_DECIDES else None

    def put_on(self, sharded: torch.Tensor) -> None:
        """Sets it on the sharded parameter, if the user has set it."""
        if self.is_set:
            sharded.grad_dtype = self._dtype

    def take_out(self, sharded: torch.Tensor) -> torch.Tensor | None:
        """Before a cast or move of the module: removes a gradient whose dtype must not follow the parameter's."""
        self.note(sharded)
        gradient = sharded.grad
        if gradient is None or not self.is_set:
            return None
        sharded.grad = None
        return gradient

    def put_back(self, sharded: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """After a cast or move: restores `grad_dtype`, which torch drops, and that gradient, moved along."""
        self.put_on(sharded)
        if gradient is not None:
            sharded.grad = gradient.to(sharded.device)

    def prepare(self, unsharded: torch.Tensor, *, sums_elsewhere: bool) -> None:
        """Tells autograd to leave gradients in the dtype of sums on a new unsharded parameter.

        `sums_elsewhere`: whether they may be summed over axes that are not data-parallel before.
        """
        sums = self.sums
        follows = GRAD_DTYPE_DECIDES or self.is_set or (sums_elsewhere and sums is not None)
        self._follows = follows and unsharded.dtype.is_floating_point
        self.may_defer = False
        if not self._follows or sums == unsharded.dtype:
            return
        unsharded.grad_dtype = sums
        self.may_defer = sums is not None and sums.itemsize > unsharded.itemsize and not sums_elsewhere

    @staticmethod
    def defer(unsharded: torch.Tensor) -> None:
        """Makes autograd leave gradients of the next backward uncast: the reduction casts them to wider sums.

        For parameters that `may_defer`. A first gradient that is not reduced must be cast at once, as in stock:
        autograd then adds the contributions of several uses of the parameter in the dtype of sums.
        """
        unsharded.grad_dtype = None

    def stop_deferring(self, unsharded: torch.Tensor) -> None:
        """Ends `defer`."""
        unsharded.grad_dtype = self.sums

    def fresh(self, compute: torch.dtype) -> torch.dtype:
        """The dtype that every rank expects for a gradient of one backward."""
        return compute if self.sums is None or self.may_defer or not self._follows else self.sums
