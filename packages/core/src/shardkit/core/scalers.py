"""GradScalers: warns where torch may overlook an overflow on another rank.

Note [Who learns of an overflow]
torch unscales the gradients of an optimizer in lists, one for each device and dtype, with one flag for each device.
After each list it reduces the flag over the axes that cut the list's first gradient, as seen from each rank. A gradient
that another axis cuts may have overflowed where nobody asks. Some ranks would then skip a step that others take, and go
on with another scale. So one of these reductions, of the gradient's list or a later one, should reach

- the ranks along all axes that cut gradients of the list, if all parameters of the model lie on the same ranks. The
  replicas of a gradient overflow together;
- all ranks that hold parameters of the model, if they lie on different ranks. That may be more than is needed.

The check is local. A reduction of our own would hang where ranks unscale differently, such as experts without tokens.
It sees parameters of one model: not those of other pipeline stages, and no tensor parallelism without DTensors.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import defaultdict
from itertools import repeat
from operator import attrgetter
from typing import TypeAlias, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit.core.engine.lazy_init import live_roots
from shardkit.core.parameters.param import FSDPParam, sharded_counterpart
from shardkit.core.parameters.placed import PlacedTensor, ScalarGradient
from shardkit.core.parameters.waiting_gradient import WaitingGradient, refuse_waiting
from shardkit.core.torch_compat import before_unscaling, no_dynamo

__all__ = ["watch_scalers"]

_Kind: TypeAlias = tuple[DeviceMesh, tuple[bool, ...]]
"""A mesh, and which of its axes cut a tensor."""

_Ranks: TypeAlias = frozenset[int]

_gradient_of = attrgetter("grad")
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def watch_scalers() -> None:
    """Watches all GradScalers of the process, since any may unscale gradients of newly sharded parameters."""
    _checked.clear()
    _register()


@functools.cache
def _register() -> None:
    before_unscaling(_check)


@no_dynamo
def _check(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Raises RuntimeError if a gradient waits for its reduction; warns once: Note [Who learns of an overflow]."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(map(isinstance, map(_gradient_of, held), repeat(WaitingGradient))):
        for parameter in held:
            param = sharded_counterpart(parameter)
            refuse_waiting("?" if param is None else param.fqn, parameter.grad)
    # Other classes may reduce the flag themselves.
    if type(scaler).__module__.startswith("torch.") and _is_new(optimizer):
        _warn_of_overlooked(held)


def _is_new(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is seen for the first time; always for wrappers that cannot be hashed or referred to."""
    try:
        is_new = optimizer not in _checked
        _checked.add(optimizer)
    except TypeError:
        return True
    return is_new


def _warn_of_overlooked(held: list[torch.Tensor]) -> None:
    params = [param for one in held if (param := sharded_counterpart(one)) is not None]
    if not params:
        return
    reaches = _Reaches()
    others = [one for one in held if isinstance(one, DTensor)]
    trained = [one for one in (*_trained_beside(params), *others) if one.requires_grad]
    places = {reaches[_kind(one)][1] for one in trained} - {_Ranks()}
    everybody = _Ranks().union(*places) if len(places) > 1 else None
    for lists in _lists(held).values():
        asked = [reaches.asked(gradients) for gradients in lists]
        for number, gradients in enumerate(lists):
            needed = everybody or _Ranks().union(*(reaches[_kind(one)][0] for one in gradients))
            if not any(ranks >= needed for ranks in asked[number:]):
                warnings.warn(_overlooked(params, gradients[0], asked[number], needed), stacklevel=5)
                return


def _trained_beside(params: list[FSDPParam]) -> list[DTensor]:
    """The sharded parameters of all models that `params` belong to."""
    groups = {group for param in params if param.group is not None and (group := param.group()) is not None}
    models = [root.schedule.order.groups for root in live_roots]
    found = {one for model in models if not groups.isdisjoint(model) for group in model for one in group.params}
    return [cast(DTensor, param.sharded_param) for param in found.union(params)]


def _lists(held: list[torch.Tensor]) -> dict[torch.device, list[list[DTensor]]]:
    """The gradients that are DTensors, in torch's lists: in the order of the parameters."""
    lists: dict[torch.device, dict[torch.dtype, list[DTensor]]] = defaultdict(dict)
    for gradient in map(_gradient_of, held):
        if isinstance(gradient, DTensor):
            lists[gradient.device].setdefault(gradient.dtype, []).append(gradient)
    return {device: [*by_dtype.values()] for device, by_dtype in lists.items()}


def _kind(tensor: DTensor) -> _Kind:
    return tensor.device_mesh, tuple(not placement.is_replicate() for placement in tensor.placements)


class _Reaches(dict[_Kind, tuple[_Ranks, _Ranks]]):
    """For each kind of tensor the ranks along the axes that cut it, as seen from this rank, and all of its ranks."""

    def __missing__(self, kind: _Kind) -> tuple[_Ranks, _Ranks]:
        mesh, cut = kind
        at = mesh.get_coordinate()
        if at is None:  # this rank has no part of it
            return _Ranks(), _Ranks()
        along = mesh.mesh[tuple(slice(None) if one else place for one, place in zip(cut, at, strict=True))]
        self[kind] = _Ranks(along.flatten().tolist()), _Ranks(mesh.mesh.flatten().tolist())
        return self[kind]

    def asked(self, gradients: list[DTensor]) -> _Ranks:
        """The ranks over which the flag of a list is reduced. Our own classes reduce it over the axes of all of it."""
        asks_all = any(isinstance(one, PlacedTensor | ScalarGradient) for one in gradients)
        return _Ranks().union(*(self[_kind(one)][0] for one in (gradients if asks_all else gradients[:1])))


def _overlooked(params: list[FSDPParam], first: DTensor, asked: _Ranks, needed: _Ranks) -> str:
    fqns = (f"'{param.fqn}'" for param in params if param.sharded_param.grad is first)
    return (
        f"torch.amp.GradScaler may overlook an overflow: {len(needed)} ranks share parameters of the model, and it "
        f"looks at those over which parameter {next(fqns, f'of shape {tuple(first.shape)}')}, the optimizer's first in "
        f"{first.dtype}, is sharded: {len(asked)}. Some ranks would skip a step that others take. Use "
        "ShardedGradScaler of shardkit-legacy-fsdp-compat, which looks at all ranks, or train in bfloat16"
    )
