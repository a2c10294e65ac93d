"""The gradient that the sharded parameter shows while an unsharded gradient waits for its reduction.

Note [A gradient that waits]
After a backward without gradient sync the unsharded gradient stays with the unsharded parameter, which no optimizer
knows. `zero_grad()` must drop it nevertheless, but only sees sharded parameters. So during that time the gradient of
the sharded parameter is a stand-in: the waiting gradient as a DTensor with Partial placements, over its memory. Zeroing
the stand-in zeroes the waiting gradient, and if the stand-in has been removed before the next forward or backward, the
waiting gradient is dropped. If a sharded gradient from a backward with sync exists already, it is the stand-in itself.
If a Partial gradient does not fit, because of its dtype or device, zeros are used. The same is done for a sum over the
shard group that waits for its all-reduce (HSDP); that stand-in is Partial over the replicas only. If an unsharded
gradient waits as well, zeros stand in for both.

Note [The mark of a stand-in]
An in-place change of a stand-in that is not Partial is either zeroing or something else, such as scaling. Its values
tell which, if one of them is not zero. So if the first value is zero it is made -0.0: this compares equal, remains
when it is scaled, and becomes 0.0 when it is zeroed. An empty shard has no values, and its rank takes every change for
zeroing. If a parameter has such ranks, the others refuse changes that are not zeroing: otherwise some ranks would drop
the waiting gradient and others reduce it.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial

from shardkit.core.parameters.adapters import ParameterForm
from shardkit.core.runtime.sharding import ChunkLayout
from shardkit.core.torch_compat import like_dtensor, local_of, new_dtensor, version_of

__all__ = ["StandIn"]


class StandIn:
    """The stand-in of one parameter, if one of its gradients is waiting.

    Attributes:
        gradient: the stand-in; None if no gradient is waiting.
        is_made: whether it was made for this, because the parameter has no other gradient; otherwise the stand-in is
            the sharded gradient of an earlier backward.
    """

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None
        self.is_made = False
        self._version = 0
        self._memory: torch.UntypedStorage | None = None  # of the waiting gradient

    def put(
        self,
        sharded: DTensor,
        accumulated: torch.Tensor | None,
        partial: torch.Tensor | None,
        form: ParameterForm,
        shard: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """After each backward without sync: makes `sharded.grad` stand in for a waiting gradient, and returns it.

        Args:
            sharded: the sharded parameter.
            accumulated: the unsharded gradient, if one waits: of the unsharded parameter's shape; a DTensor with tensor
                parallelism.
            partial: the sum over the shard group, if one waits: of the shape of `shard`.
            form: form of the parameter.
            shard: the plain tensor inside `sharded`.
            dtype: dtype of the future gradient of `sharded`.
        """
        existing = sharded.grad
        if existing is None or _is_partial(existing):
            made = None
            if accumulated is None or partial is None:
                made = self._partial(sharded, accumulated, partial, form, shard, dtype)
            if made is None:
                made = like_dtensor(form.local(torch.zeros(shard.shape, dtype=dtype, device=shard.device)), sharded)
            sharded.grad, self.is_made = made, True
        self.gradient = sharded.grad
        assert self.gradient is not None
        if not _is_partial(self.gradient):
            _mark(local_of(self.gradient))
        self._version = version_of(self.gradient)
        return self.gradient

    def _partial(
        self,
        sharded: DTensor,
        accumulated: torch.Tensor | None,
        partial: torch.Tensor | None,
        form: ParameterForm,
        shard: torch.Tensor,
        dtype: torch.dtype,
    ) -> DTensor | None:
        """The only gradient that waits as a Partial DTensor over its memory; None if it does not fit."""
        waiting = partial if accumulated is None else accumulated
        if waiting is None or isinstance(waiting, DTensor) or (waiting.dtype, waiting.device) != (dtype, shard.device):
            return None
        if accumulated is None and type(sharded) is not DTensor:
            return None
        sums = [accumulated is not None or placement.is_replicate() for placement in form.placements]
        places = [Partial("avg") if one else own for one, own in zip(sums, form.placements, strict=True)]
        strided = waiting.layout is torch.strided  # a sparse one is refused
        self._memory = waiting.untyped_storage() if strided else None
        return new_dtensor(waiting if accumulated is not None else form.local(waiting), form.mesh, places, form.shape)

    def was_zeroed(self, fqn: str, sharded: torch.Tensor, layout: ChunkLayout) -> bool:
        """Whether the user has zeroed or removed the gradient of `sharded` since `put`.

        Args:
            fqn: FQN of the parameter.
            sharded: the sharded parameter.
            layout: how it is cut over the ranks.

        Raises:
            RuntimeError: if another gradient was assigned, or if it was changed in another way and a rank with an empty
                shard takes that for zeroing.
        """
        stand_in = self.gradient
        if stand_in is None:
            return False
        if sharded.grad is None:
            return True
        if sharded.grad is not stand_in:
            raise RuntimeError(
                f"the gradient of parameter '{fqn}' was assigned while another gradient of it waits for its reduction; "
                "assign gradients after the last backward of a step, which is one with gradient sync, or remove them "
                "by zero_grad()"
            )
        local = local_of(stand_in)
        if _is_partial(stand_in):  # over the waiting gradient's memory, unless a cast has moved it
            moved = local.layout is torch.strided and local.untyped_storage() is not self._memory
            return moved and not local.any()
        if version_of(stand_in) == self._version:
            return False
        zeroed = not local.any() and not (local.numel() and torch.signbit(_first(local).real))
        if not zeroed and not all(run.length for run in layout.runs):
            raise RuntimeError(
                f"the gradient of parameter '{fqn}' was changed in place while another gradient of it waits for its "
                "reduction, and ranks with an empty shard of it cannot tell whether it was zeroed; change gradients "
                "after the last backward of a step, which is one with gradient sync, or remove them by zero_grad()"
            )
        return zeroed

    def dismiss(self, sharded: torch.Tensor) -> None:
        """Removes the stand-in: no gradient is waiting any more. A change by the user stays."""
        stand_in = self.gradient
        if stand_in is not None and self.is_made and sharded.grad is stand_in:
            changed = not _is_partial(stand_in) and version_of(stand_in) != self._version
            sharded.grad = stand_in if changed else None
        self.gradient = self._memory = None
        self.is_made = False


def _is_partial(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


def _first(local: torch.Tensor) -> torch.Tensor:
    return local[(0,) * local.ndim]


@torch.no_grad()
def _mark(local: torch.Tensor) -> None:
    """Makes the first value -0.0 if it is zero (Note [The mark of a stand-in]); devices do not wait for it."""
    if local.numel():
        first = _first(local)
        first.masked_fill_(first == 0, -0.0)
