"""The norm of all gradients, and clipping by it: correct across meshes, placements, offload and ties.

Each rank sums the p-th powers of its own gradient elements. These sums are added up over every mesh axis that a
parameter is sharded on; a Replicate axis holds copies and adds nothing. Parameters on the same mesh axes share a sum,
and all sums for one process group travel in one all-reduce.

The parameters, not their gradients, decide which all-reduces run: a rank without gradients takes part.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils.weak import WeakTensorKeyDictionary

from shardkit.core.engine.group import FSDPParamGroup
from shardkit.core.mesh import device_of
from shardkit.core.parameters.param import sharded_counterpart
from shardkit.core.torch_compat import foreach_norm, foreach_scale_, lies_like, local_of

# The first of plain parameters whose norms were compared, and how many: once, as the host waits for it. Their norms are
# summed over ranks in each call: what ranks exchange must not depend on what one of them remembers.
_compared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

Parameters = torch.Tensor | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales all gradients by ``min(1, max_norm / (norm + 1e-6))``, where ``norm`` is taken over all of them together.

    The rule is that of `torch.nn.utils.clip_grad_norm_`. Collective over the process groups of the meshes that the
    parameters are sharded on, one all-reduce each: every rank calls it with the same parameters in the same order, even
    if all its gradients are None. Gradients may be on CPU while the mesh is on another device.

    Args:
        parameters: a tensor, tensors, or (name, tensor) pairs such as `module.named_parameters()`; names improve the
            errors. A plain tensor is taken to be the same on every rank. A repeated tensor counts once.
        max_norm: the largest norm that is left as it is.
        norm_type: the p of the p-norm: any number above 0, or inf for the largest absolute value.
        error_if_nonfinite: raise, on every rank, if the norm is nan or inf. Waits for the device.
        foreach: use the fused multi-tensor kernels; None uses them where all gradients of a kind are on an accelerator.

    Returns:
        The norm before clipping: a plain 0-dim tensor, fp32 (fp64 if any parameter is), the same on all ranks, on the
        device of the mesh.

    Raises:
        ValueError: if `max_norm` is negative or nan, `norm_type` does not name a p-norm, or a gradient is not placed
            like its parameter.
        RuntimeError: if a gradient has yet to be reduced, or if the norm is not finite, with `error_if_nonfinite`;
            lists the gradients at fault.
    """
    if not float(max_norm) >= 0:
        raise ValueError(
            f"max_norm={max_norm}, expected a number from 0 on, or inf; pass inf to compute the norm without clipping"
        )
    distinct = _distinct(parameters)
    norm = grad_norm(distinct, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach)
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    with torch.no_grad():
        for device, grads in _by_device(_local_grad(*one) for one in distinct).items():
            if _use_foreach(foreach, device):
                foreach_scale_(grads, factor.to(device))
                continue
            local_factor = factor.to(device)
            for grad in grads:
                grad.mul_(local_factor)
    return norm


def grad_norm(
    parameters: Parameters, norm_type: float = 2.0, *, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """The `norm_type`-norm of all gradients together; arguments, result and errors as for `clip_grad_norm_`.

    Collective in the same way; changes nothing.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} is not a p-norm: expected a number above 0, or inf")
    distinct = _distinct(parameters)
    params = [param for _, one in distinct if (param := sharded_counterpart(one)) is not None]
    for schedule in {FSDPParamGroup.of(param).schedule for param in params}:
        schedule.refuse_unended("the norm of gradients is taken")
    for param in params:
        param.refuse_pending("the norm of gradients is taken")
    plan = _Plan.of(distinct)
    with torch.no_grad():
        parts = [_measure(bucket, norm_type, plan, foreach) for bucket in plan.buckets]
        own = list(parts)
        plan.reduce(parts, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
        for index, bucket in enumerate(plan.buckets):
            if bucket.plain is None or not bucket.groups:
                continue
            summed, parts[index] = parts[index], own[index]
            if _compared.get(bucket.plain) != len(bucket.entries):
                _compared[bucket.plain] = len(bucket.entries)
                _warn_of_own_gradients(bucket, own[index], summed, norm_type)
        norm = _combine(parts, norm_type, plan)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(_nonfinite_message(plan, norm, norm_type))
    return norm


@dataclass
class _Bucket:
    """Parameters whose gradients add up over the same mesh axes."""

    device: torch.device  # where the partial result is kept
    # The ranks of each process group to reduce over; of plain parameters, those over which they should be the same.
    groups: tuple[tuple[int, ...], ...] = ()
    entries: list[tuple[str, torch.Tensor | None]] = field(default_factory=list)  # name, local gradient
    plain: torch.Tensor | None = None  # the first of plain parameters


@dataclass
class _Plan:
    """The sums and the process groups they are added over. All ranks of a group see the same buckets in one order."""

    buckets: list[_Bucket]
    groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, torch.device]]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(parameters: Sequence[tuple[str, torch.Tensor]]) -> _Plan:
        buckets: dict[object, _Bucket] = {}
        groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, torch.device]] = {}
        device: torch.device | None = None
        for name, parameter in parameters:
            if not isinstance(parameter, DTensor):
                bucket = buckets.setdefault(("plain", parameter.device), _Bucket(parameter.device, plain=parameter))
            elif (mesh := parameter.device_mesh).get_coordinate() is None:
                continue  # this rank holds no part of the parameter and belongs to none of its groups
            else:
                axes, home = _sharded_axes(name, parameter.placements, mesh), device_of(mesh)
                device = device or home
                # The key has the whole mesh, not only this rank's groups: only then do all ranks of a group agree.
                if (mesh, axes) not in buckets:
                    over = {tuple(dist.get_process_group_ranks(one)): one for one in map(mesh.get_group, axes)}
                    groups.update({ranks: (one, home) for ranks, one in over.items() if ranks not in groups})
                    buckets[mesh, axes] = _Bucket(home, tuple(over))
                bucket = buckets[mesh, axes]
            bucket.entries.append((name, _local_grad(name, parameter)))
        for bucket in buckets.values():
            if bucket.plain is not None:
                bucket.groups = tuple(groups)
        wide = any(parameter.dtype in (torch.float64, torch.complex128) for _, parameter in parameters)
        if device is None:
            device = parameters[0][1].device if parameters else torch.device("cpu")
        return _Plan(list(buckets.values()), groups, torch.float64 if wide else torch.float32, device)

    def reduce(self, parts: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> None:
        """Reduces `parts`, one vector per bucket, over the groups of their buckets: one all-reduce per group.

        The groups come in order of first use by a parameter, so that ranks wait for each other in one order.
        """
        for ranks, (group, device) in self.groups.items():
            indices = [index for index, bucket in enumerate(self.buckets) if ranks in bucket.groups]
            wire = torch.cat([parts[index].to(device) for index in indices])
            dist.all_reduce(wire, op, group=group)
            sizes = [parts[index].numel() for index in indices]
            for index, part in zip(indices, wire.split(sizes), strict=True):
                parts[index] = part


def _measure(bucket: _Bucket, norm_type: float, plan: _Plan, foreach: bool | None) -> torch.Tensor:
    """This rank's share of a bucket: [sum of p-th powers], or [largest, any nan] for the inf-norm. fp64."""
    norms = []
    for device, grads in _by_device(grad for _, grad in bucket.entries).items():
        real = [grad.abs() if grad.is_complex() else grad for grad in grads]
        if _use_foreach(foreach, device):
            found = list(foreach_norm(real, norm_type, plan.dtype))
        else:
            found = [torch.linalg.vector_norm(grad, norm_type, dtype=plan.dtype) for grad in real]
        norms.append(torch.stack(found).to(bucket.device))
    # The few numbers left are combined in fp64: powers of large norms would overflow fp32.
    every = torch.cat(norms).double() if norms else torch.zeros(1, dtype=torch.float64, device=bucket.device)
    if not math.isinf(norm_type):
        return every.pow(norm_type).sum().reshape(1)
    # MAX may drop a nan, depending on the backend, so the nan travels as a separate number.
    largest = every.nan_to_num(nan=math.inf, posinf=math.inf).max()
    return torch.stack([largest, every.isnan().any().double()])


def _by_device(grads: Iterable[torch.Tensor | None]) -> dict[torch.device, list[torch.Tensor]]:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        if grad is not None and grad.numel():
            by_device.setdefault(grad.device, []).append(grad)
    return by_device


def _warn_of_own_gradients(bucket: _Bucket, mine: torch.Tensor, summed: torch.Tensor, norm_type: float) -> None:
    """Warns if plain gradients of this rank are not those of the others, whose sum or maximum is `summed`."""
    copies = 1 if math.isinf(norm_type) else math.prod(map(len, bucket.groups))
    has_grads = any(grad is not None and grad.numel() for _, grad in bucket.entries)
    if has_grads and not torch.allclose(mine.to(summed.device) * copies, summed, rtol=1e-4, equal_nan=True):
        name = next(name for name, grad in bucket.entries if grad is not None)
        warnings.warn(
            f"the norm of gradients takes plain parameters ({name}, ...) to be the same on every rank, and their "
            "gradients differ, so the norm is too small and each rank clips by another one. Reduce their gradients "
            "first; make parameters of which each rank has its own, such as experts, DTensors: "
            "DTensor.from_local(tensor, mesh, [Shard(0)])",
            stacklevel=4,
        )


def _combine(parts: list[torch.Tensor], norm_type: float, plan: _Plan) -> torch.Tensor:
    if not parts:
        return torch.zeros((), dtype=plan.dtype, device=plan.device)
    table = torch.stack([part.to(plan.device) for part in parts])
    if not math.isinf(norm_type):
        return table[:, 0].sum().pow(1.0 / norm_type).to(plan.dtype)
    largest, nan = table.amax(dim=0).unbind()
    return torch.where(nan > 0, math.nan, largest).to(plan.dtype)


def _nonfinite_message(plan: _Plan, norm: torch.Tensor, norm_type: float) -> str:
    """Asks the same groups once more which gradients are not finite. All ranks call this together."""
    flags = []
    for bucket in plan.buckets:
        at_fault = [
            torch.zeros((), dtype=torch.bool) if grad is None else grad.isfinite().logical_not().any()
            for _, grad in bucket.entries
        ]
        flags.append(torch.stack([flag.to(bucket.device) for flag in at_fault]).int())
    plan.reduce(flags, dist.ReduceOp.MAX)
    names = [
        name
        for bucket, flag in zip(plan.buckets, flags, strict=True)
        for (name, _), bad in zip(bucket.entries, flag.tolist(), strict=True)
        if bad
    ]
    cause = (
        "gradients with nan or inf: " + ", ".join(names) if names else "every gradient is finite, the norm overflowed"
    )
    return (
        f"the {norm_type:g}-norm of the gradients is {norm.item()}, expected a finite number; {cause}. "
        "Skip this step, lower the learning rate or the loss scale, or pass error_if_nonfinite=False"
    )


def _distinct(parameters: Parameters) -> list[tuple[str, torch.Tensor]]:
    """Parameters with names, each once; a sharded one for its unsharded one, which has no gradient."""
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for index, item in enumerate([parameters] if isinstance(parameters, torch.Tensor) else parameters):
        whole = isinstance(item, torch.Tensor)
        name, parameter = (f"parameters[{index}] of shape {tuple(item.shape)}", item) if whole else item
        if (param := sharded_counterpart(parameter)) is not None:
            parameter = param.sharded_param
        seen.setdefault(id(parameter), (name, parameter))
    return list(seen.values())


def _sharded_axes(name: str, placements: Sequence[Placement], mesh: DeviceMesh) -> tuple[int, ...]:
    for placement in placements:
        if placement.is_partial():
            raise ValueError(
                f"{name}: placements {tuple(placements)} hold a pending sum, expected Shard and Replicate only; "
                "redistribute it first"
            )
    sharded = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    return tuple(axis for axis in sharded if mesh.size(axis) > 1)


def _local_grad(name: str, parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's elements of a parameter's gradient. Raises ValueError if it is not placed like the parameter."""
    grad = parameter.grad
    if not isinstance(parameter, DTensor) or grad is None:
        return grad
    if not lies_like(grad, parameter) or grad.device_mesh != parameter.device_mesh:  # type: ignore[attr-defined]
        raise ValueError(
            f"{name}: the gradient has placements {getattr(grad, 'placements', None)} on "
            f"{getattr(grad, 'device_mesh', 'no mesh')}, expected those of its parameter, {parameter.placements} on "
            f"{parameter.device_mesh}; call redistribute(parameter.device_mesh, parameter.placements) of the gradient, "
            "or make it with DTensor.from_local"
        )
    return local_of(grad)


def _use_foreach(foreach: bool | None, device: torch.device) -> bool:
    return device.type != "cpu" if foreach is None else foreach
