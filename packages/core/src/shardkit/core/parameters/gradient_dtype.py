"""In which dtype the gradients of a parameter accumulate, are summed, and arrive at the sharded parameter.

Note [Three dtypes of a gradient]
Autograd leaves an unsharded gradient in the dtype of the computation. It is *summed*, over backwards without gradient
sync and over ranks, in `reduce_dtype`. Without one we do as stock of the torch that is installed: since 2.15 a
parameter's `grad_dtype` decides, which is its own dtype unless it was set; before, the dtype of the computation. A sum
is *delivered* in the sharded parameter's `grad_dtype`. A `grad_dtype` of None takes what comes.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES, grad_dtype_of, set_grad_dtype

__all__ = ["GradientDtype"]


class GradientDtype:
    """The `grad_dtype` of one parameter, as far as its user has set it, and what follows from it.

    Attributes:
        may_defer: whether sums are wider than the computation, so that their cast can wait.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._dtype: torch.dtype | None = None
        self._follows = False  # whether autograd was told
        self.may_defer = False

    def note(self, parameter: torch.Tensor) -> None:
        """Takes over what was set on `parameter`. A cast, a move and an assigning load bring parameters without it."""
        is_set, dtype = grad_dtype_of(parameter)
        if is_set:
            self._is_set, self._dtype = True, dtype

    def put_on(self, sharded: torch.Tensor) -> None:
        """Sets it on the sharded parameter, unless it was never set."""
        if self._is_set:
            set_grad_dtype(sharded, self._dtype)

    def take_out(self, sharded: torch.Tensor) -> torch.Tensor | None:
        """Before a cast or move of the module: takes away a gradient whose dtype is not the parameter's to change."""
        self.note(sharded)
        gradient = sharded.grad
        if gradient is None or not self._is_set:
            return None
        sharded.grad = None
        return gradient

    def put_back(self, sharded: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """After it: `grad_dtype`, which torch forgets, and that gradient, moved along."""
        self.put_on(sharded)
        if gradient is not None:
            sharded.grad = gradient.to(sharded.device)

    def of_sums(self, reduce_dtype: torch.dtype | None, original: torch.dtype) -> torch.dtype | None:
        """The dtype of sums; None for that of the gradient, whatever it is."""
        if reduce_dtype is not None:
            return reduce_dtype
        if self._is_set:
            return self._dtype
        return original if GRAD_DTYPE_DECIDES else None

    def of_shard(self, original: torch.dtype) -> torch.dtype | None:
        """The dtype of the sharded gradient of a parameter of dtype `original`; None for that of the sum."""
        return self._dtype if self._is_set else original

    def prepare(self, unsharded: torch.Tensor, sums: torch.dtype | None) -> None:
        """Tells autograd what to leave on a new unsharded parameter: gradients in the dtype of sums."""
        self._follows = (GRAD_DTYPE_DECIDES or self._is_set) and unsharded.dtype.is_floating_point
        self.may_defer = False
        if not self._follows or sums == unsharded.dtype:
            return
        set_grad_dtype(unsharded, sums)
        replicated = isinstance(unsharded, DTensor) and any(one.is_replicate() for one in unsharded.placements)
        self.may_defer = sums is not None and sums.itemsize > unsharded.itemsize and not replicated

    @staticmethod
    def defer(unsharded: torch.Tensor) -> None:
        """Leaves gradients of the backward that begins as they come: the reduction casts them to wider sums on the way.

        For parameters that `may_defer`. A first gradient that nothing reduces has to be cast at once, as stock does:
        autograd then adds up what several uses of the parameter contribute in the dtype of sums.
        """
        set_grad_dtype(unsharded, None)

    @staticmethod
    def stop_deferring(unsharded: torch.Tensor, sums: torch.dtype | None) -> None:
        """After it."""
        set_grad_dtype(unsharded, sums)

    def fresh(self, compute: torch.dtype, sums: torch.dtype | None) -> torch.dtype:
        """The dtype that every rank expects a gradient of one backward to have."""
        return compute if sums is None or self.may_defer or not self._follows else sums

    def before_other_axes(self, gradient: DTensor, sums: torch.dtype | None) -> torch.Tensor:
        """A gradient that is to be summed over axes of tensor parallelism first: that is in the dtype of sums, too."""
        if not GRAD_DTYPE_DECIDES or sums is None:
            return gradient
        return gradient.to(sums) if any(placement.is_partial() for placement in gradient.placements) else gradient
