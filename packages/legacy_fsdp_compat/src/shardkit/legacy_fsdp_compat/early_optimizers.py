"""Optimizers that were constructed before their model was wrapped, as `use_orig_params=True` allows.

In stock the parameters stay the same objects. Here sharded parameters replace them in the modules, and, before the
first backward, in such optimizers, so that `zero_grad()` and `step()` see the gradients.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.parameters.param import FSDPParam, sharded_counterpart
from shardkit.core.torch_compat import like_dtensor

__all__ = ["adopt_early_optimizers"]


@torch.no_grad()
def adopt_early_optimizers(originals: Iterable[Sequence[weakref.ReferenceType[nn.Parameter]]]) -> None:
    """Replaces original parameters in optimizers by the sharded ones, and their state by the rows of the shard.

    An optimizer cannot be looked up by its parameters, so all objects of the process are searched, but only if an
    original is still referenced.
    """
    alive = {id(one) for unit in originals for reference in unit if (one := reference()) is not None}
    if not alive:
        return
    # An instance may claim any class, for example a proxy whose object is gone.
    for optimizer in [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]:
        for group in getattr(optimizer, "param_groups", ()):
            for index, parameter in enumerate(group["params"]):
                param = sharded_counterpart(parameter) if id(parameter) in alive else None
                if param is not None and param.sharded_param is not parameter:
                    group["params"][index] = param.sharded_param
                    _move_state(optimizer, parameter, param)


def _move_state(optimizer: torch.optim.Optimizer, original: torch.Tensor, param: FSDPParam) -> None:
    if original in optimizer.state:
        state = optimizer.state.pop(original)
        optimizer.state[param.sharded_param] = {name: _own_part(value, param) for name, value in state.items()}


def _own_part(value: object, param: FSDPParam) -> object:
    sharded = param.sharded_param
    if (
        not isinstance(value, torch.Tensor)
        or isinstance(value, DTensor)
        or value.shape != param.shape
        or not value.dim()
    ):
        return value
    assert isinstance(sharded, DTensor)
    rank = param.mesh.shard_rank
    rows = value.narrow(0, param.layout.offset(rank), param.layout.length(rank)) if param.mesh.shard_size > 1 else value
    return like_dtensor(param.form.local(rows.clone(memory_format=torch.contiguous_format)), sharded)
