"""The gradient that the sharded parameter shows while an unsharded gradient waits for its reduction.

Note [A gradient that waits]
After a backward without gradient sync the unsharded gradient stays with the unsharded parameter, which no optimizer
knows. `zero_grad()` must drop it nevertheless, but only sees sharded parameters. So during that time the gradient of
the sharded parameter is a stand-in: the waiting gradient as a DTensor with Partial placements, over its memory. Zeroing
the stand-in zeroes the waiting gradient, and if the stand-in has been removed before the next forward or backward, the
waiting gradient is dropped. If a sharded gradient from a backward with sync exists already, it is the stand-in itself.
If a Partial gradient does not fit, because of its dtype or device, zeros are used. The same is done for a sum over the
shard group that waits for its all-reduce (HSDP); that stand-in is Partial over the replicas only.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial

from shardkit.core.parameters.adapters import ParameterForm
from shardkit.core.torch_compat import like_dtensor, local_of, new_dtensor, version_of

__all__ = ["StandIn"]


class StandIn:
    """The stand-in of one parameter, if one of its gradients is waiting.

    Attributes:
        gradient: the stand-in; None if no gradient is waiting.
    """

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None
        self._version = 0
        self._memory: torch.UntypedStorage | None = None  # of the waiting gradient

    def put(
        self,
        sharded: DTensor,
        waiting: torch.Tensor,
        form: ParameterForm,
        shard: torch.Tensor,
        dtype: torch.dtype,
        *,
        whole: bool,
    ) -> torch.Tensor:
        """After each backward without sync: makes `sharded.grad` stand in for `waiting`, and returns it.

        Args:
            sharded: the sharded parameter.
            waiting: the unsharded gradient, of the unsharded parameter's shape; a DTensor with tensor parallelism.
            form: form of the parameter.
            shard: the plain tensor inside `sharded`.
            dtype: dtype of the future gradient of `sharded`.
            whole: False if `waiting` is a sum over the shard group instead, of the shape of `shard`.
        """
        if sharded.grad is None or _is_partial(sharded.grad):
            fits = not isinstance(waiting, DTensor) and (waiting.dtype, waiting.device) == (dtype, shard.device)
            if not fits or not (whole or type(sharded) is DTensor):
                zeros = torch.zeros(shard.shape, dtype=dtype, device=shard.device)
                sharded.grad = like_dtensor(form.local(zeros), sharded)
            else:
                sums = [whole or placement.is_replicate() for placement in form.placements]
                places = [Partial("avg") if one else own for one, own in zip(sums, form.placements, strict=True)]
                local = waiting if whole else form.local(waiting)
                sharded.grad = new_dtensor(local, form.mesh, places, form.shape)
        self.gradient, self._version = sharded.grad, version_of(sharded.grad)
        plain = local_of(waiting) if isinstance(waiting, DTensor) else waiting
        self._memory = plain.untyped_storage() if plain.layout is torch.strided else None  # a sparse one is refused
        return sharded.grad

    def was_zeroed(self, sharded: torch.Tensor) -> bool:
        """Whether the user has zeroed or removed the gradient of `sharded` since `put`."""
        stand_in = self.gradient
        if stand_in is None:
            return False
        if sharded.grad is not stand_in:
            return True
        local = local_of(stand_in)
        if _is_partial(stand_in):  # over the waiting gradient's memory, unless a cast has moved it
            untouched = local.layout is not torch.strided or local.untyped_storage() is self._memory
        else:
            untouched = version_of(stand_in) == self._version
        return not untouched and not local.any()

    def dismiss(self, sharded: torch.Tensor) -> None:
        """Removes the stand-in: no gradient is waiting any more."""
        if self.gradient is not None and sharded.grad is self.gradient and _is_partial(self.gradient):
            sharded.grad = None
        self.gradient = self._memory = None


def _is_partial(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)
