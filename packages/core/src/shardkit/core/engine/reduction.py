"""From the unsharded gradients of a group to its sharded ones: buckets, division, all-reduce, delivery."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core.engine.room import Group
from shardkit.core.engine.settings import GroupSettings
from shardkit.core.parameters.param import FSDPParam
from shardkit.core.runtime.collective import all_reduce
from shardkit.core.runtime.lanes import NEXT_STAGE, Program, Reduction, hold
from shardkit.core.runtime.plan import Mean, ReduceItem, Transport, plan_reduce, report_allocated, report_freed
from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES, has_gradient_hooks

# At most this many plans, one for each set of parameters with gradients. Few sets occur unless use is random.
_MOST_PLANS = 64


@functools.lru_cache(maxsize=64)
def division_for(size: int, dtype: torch.dtype, factor: float | None, force_sum: bool) -> tuple[Mean, float | None]:
    """The mean over `size` ranks, and a divisor at the end, after all-reduce: stock's arithmetic in the same order.

    The mean is that of the reduce-scatter, of which only the operation is left for replicas. float32 and bfloat16 have
    range to spare: it is the collective's own AVG, or a sum divided by the user's `factor`. Other dtypes could overflow
    in the sum or underflow in the division, so about sqrt(factor) is divided before the sum and the rest after.
    """
    if dtype in (torch.float32, torch.bfloat16) and not force_sum:
        if factor is not None:
            return Mean(after=factor), None
        return Mean(dist.ReduceOp.AVG if size > 1 else dist.ReduceOp.SUM), None
    total = float(size) if factor is None else factor
    if dtype in (torch.float32, torch.bfloat16):
        return Mean(), total
    before = 1.0
    while total % before == 0 and total > before * before:
        before *= 2
    return Mean(before=before), total / before


@dataclass
class Bucket:
    """Gradients of one dtype whose sums have one dtype, `dtype`, and their parameters."""

    params: list[FSDPParam]
    gradients: list[torch.Tensor]
    grad_dtype: torch.dtype
    dtype: torch.dtype
    mean: Mean
    after_all: float | None


def take_gradients(
    params: Sequence[FSDPParam], settings: GroupSettings, *, alike: bool
) -> tuple[list[FSDPParam], list[torch.Tensor]]:
    """Takes the unsharded gradients of `params`; returns the parameters that had one, and them.

    With `alike` some were accumulated in the dtype of sums and some are fresh, which may differ by rank; they are cast
    to the same dtype. Raises RuntimeError for a sparse one.
    """
    found: list[FSDPParam] = []
    gradients: list[torch.Tensor] = []
    for param in params:
        gradient = param.take_gradient(settings.reduce_unused_params, settings.all_reduce_grads, alike)
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of parameter '{param.fqn}' is sparse ({gradient.layout}); expected a dense one, as "
                "ranks reduce rows in place. Build the embedding with sparse=False, or pass the parameter in "
                "ignored_params and reduce its gradient yourself"
            )
        found.append(param)
        gradients.append(gradient.to(param.dtypes.sums or gradient.dtype) if alike else gradient)
    return found, gradients


def buckets(
    group: Group,
    params: Sequence[FSDPParam],
    gradients: list[torch.Tensor],
    transport: Transport | None,
    settings: GroupSettings,
) -> list[Bucket]:
    """The gradients of each dtype, in an order that is the same on all ranks.

    Takes the gradients out of their list. Those of a single rank are delivered at once, without a bucket.
    """
    common = _common_dtype(params, gradients) if GRAD_DTYPE_DECIDES else None
    found: dict[tuple[torch.dtype, torch.dtype], Bucket] = {}
    for param, gradient in zip(params, gradients, strict=True):
        kind = gradient.dtype, common or param.dtypes.sums or gradient.dtype
        if (bucket := found.get(kind)) is None:
            factor, force_sum = settings.gradient_divide_factor, settings.force_sum_reduction
            bucket = found[kind] = Bucket([], [], *kind, *division_for(group.mesh.size, kind[1], factor, force_sum))
        bucket.params.append(param)
        bucket.gradients.append(gradient)
    gradients.clear()
    if transport is None and not group.mesh.replicate_axes and settings.all_reduce_hook is None:
        for bucket in found.values():
            _deliver_unreduced(group, bucket)
        return []
    return [*found.values()]


def _common_dtype(params: Sequence[FSDPParam], gradients: list[torch.Tensor]) -> torch.dtype:
    """The dtype that holds the sums of all `gradients` of a group, and partial sums that wait for an all-reduce."""
    dtypes = {param.dtypes.sums or gradient.dtype for param, gradient in zip(params, gradients, strict=True)}
    dtypes.update(param.partial.dtype for param in params if param.partial is not None)
    return functools.reduce(torch.promote_types, dtypes)


def program(group: Group, bucket: Bucket, transport: Transport | None, settings: GroupSettings) -> Program:
    """The program that reduces `bucket` and delivers its sums. Packs its gradients now, on the current stream."""
    if transport is None:
        sizes = [gradient.numel() for gradient in bucket.gradients]
        scatter = _copy_all(bucket, group.label)
        return _reduce(group, bucket, scatter, lambda output: output.split(sizes), settings)
    key = (bucket.grad_dtype, bucket.dtype, transport, *map(id, bucket.params))
    plan = group.reduce_plans.get(key)
    if plan is None:
        if len(group.reduce_plans) >= _MOST_PLANS:
            group.reduce_plans.clear()
        items = [ReduceItem(param.fqn, param.layout) for param in bucket.params]
        places = {param: place for place, param in enumerate(group.params)}
        members = [places[param] for param in bucket.params]
        dtypes = bucket.grad_dtype, bucket.dtype
        plan = plan_reduce(items, transport, group.label, group.mesh.shard_rank, *dtypes, members)
        group.reduce_plans[key] = plan
    scatter = plan.transport.reduce(plan, bucket.gradients, bucket.mean)
    return _reduce(group, bucket, scatter, plan.output_views, settings)


def _reduce(
    group: Group,
    bucket: Bucket,
    scatter: Reduction,
    views_of: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    settings: GroupSettings,
) -> Program:
    """Reduces over the shard group by `scatter`, which returns a flat tensor with a view for each parameter; delivers.

    Then over replicas, and runs the user's hook.
    """
    output = yield from scatter
    del scatter  # it has the packed gradients, or those that were reduced in place
    try:
        params, views = bucket.params, views_of(output)
        mesh, hook = group.mesh, settings.all_reduce_hook
        over = mesh.replicate_groups if mesh.replicate_axes and settings.native_all_reduce else ()
        waits = bool(over) and not settings.all_reduce_grads
        for param, view in zip(params, views, strict=True) if mesh.replicate_axes else ():
            if param.partial is not None and waits:
                if param.partial.dtype != torch.promote_types(param.partial.dtype, view.dtype):
                    param.partial = param.partial.to(view.dtype)  # grad_dtype=None, and a wider gradient than before
                param.partial.add_(view)
            elif waits:
                param.partial = view
            elif param.partial is not None:
                view.add_(param.partial)
                param.partial = None
        if waits:
            return
        if over or hook is not None:
            # The next stage needs none of the gradients, and the next group's reduce-scatter need not wait for it.
            yield NEXT_STAGE
            hold(output)  # each stage has a stream of its own, which must end before the memory is used again
        for replicas in over:
            yield from all_reduce(output, replicas, bucket.mean.op, group.label)
        if hook is not None:
            _run_hook(hook, output, settings.all_reduce_hook_stream)
        if bucket.after_all not in (None, 1):
            output.div_(bucket.after_all)
        dtypes = {param.dtypes.delivered or output.dtype for param in params}
        if len(dtypes) == 1 and (group.offloaded or output.dtype not in dtypes):
            flat = output.to(dtypes.pop())
            views = views_of(_to_host(params, flat) if group.offloaded else flat)
        stepped = [param.deliver(view) for param, view in zip(params, views, strict=True)]
        if any(stepped):
            group.versions.clear()
        for call in group.when_delivered:
            call(params)
    finally:
        report_freed(output, group.label, "reduce_output")


def _to_host(params: Sequence[FSDPParam], flat: torch.Tensor) -> torch.Tensor:
    """The gradients of `params` in one host buffer, if all shards are on the host, else `flat`, for `deliver` to copy.

    The buffer is a new one, because the user may hold gradients of an earlier backward. Copies to pinned memory
    overlap, unless host code reads them at once; the end of backward waits for them.
    """
    pinned = params[0].pinned
    if flat.device.type == "cpu" or any(param.offload is None or param.pinned != pinned for param in params):
        return flat
    sharded = [param.sharded_param for param in params]
    overlap = pinned and not any(one.grad is not None or has_gradient_hooks(one) for one in sharded)
    host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=pinned)
    return host.copy_(flat, non_blocking=overlap)


def _copy_all(bucket: Bucket, label: str) -> Reduction:
    """The reduce-scatter of a single rank, which sends nothing."""
    gradients = bucket.gradients
    hold(*gradients)
    sizes = [gradient.numel() for gradient in gradients]
    output = torch.empty(sum(sizes), dtype=bucket.dtype, device=gradients[0].device)
    report_allocated(output, label, "reduce_output")
    for part, gradient in zip(output.split(sizes), gradients, strict=True):
        part.copy_(gradient.reshape(-1))
    gradients.clear()
    for divisor in (bucket.mean.before, bucket.mean.after):
        if divisor not in (None, 1):
            output.div_(divisor)
    return output
    yield


def _run_hook(hook: Callable[[torch.Tensor], None], output: torch.Tensor, stream: Any) -> None:
    if stream is None:
        hook(output)
        return
    device_module = torch.get_device_module(output.device)
    lane = device_module.current_stream()
    stream.wait_stream(lane)
    with device_module.stream(stream):
        hook(output)
    lane.wait_stream(stream)


def _deliver_unreduced(group: Group, bucket: Bucket) -> None:
    """A single rank, nothing to reduce: autograd's gradient becomes the sharded one without a copy."""
    divisors = bucket.mean.before, bucket.mean.after, bucket.after_all
    factors = [one for one in divisors if one not in (None, 1)]
    reduced = bucket.gradients
    if factors or bucket.grad_dtype != bucket.dtype:
        reduced = [functools.reduce(torch.div, factors, gradient.to(bucket.dtype)) for gradient in reduced]
    stepped = [param.deliver(gradient) for param, gradient in zip(bucket.params, reduced, strict=True)]
    if any(stepped):
        group.versions.clear()
    for call in group.when_delivered:
        call(bucket.params)
