"""From the unsharded gradients of a group to its sharded ones: buckets, division, all-reduce, delivery."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import attrgetter, eq, is_, is_not
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core.engine.settings import GroupSettings
from shardkit.core.mesh import DataParallelMesh
from shardkit.core.parameters.param import FSDPParam
from shardkit.core.runtime.collective import all_reduce
from shardkit.core.runtime.lanes import NEXT_STAGE, Program, Reduction, hold
from shardkit.core.runtime.plan import Mean, ReduceItem, ReducePlan, Transport, plan_reduce
from shardkit.core.runtime.storage import note_allocated, note_freed
from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES

__all__ = ["Bucket", "Division", "GradientReduction", "division_for"]


_dtype_of = attrgetter("dtype")
_layout_of = attrgetter("layout")

# At most this many plans, one for each set of parameters with gradients. Few sets occur unless use is random.
_MOST_PLANS = 64


@dataclass(frozen=True)
class Division:
    """How the sum over ranks becomes a mean, or is divided by the user's factor.

    Attributes:
        op: reduction of the collectives, SUM or AVG.
        before: divisor of each rank's gradient before the sum.
        after_scatter: divisor of the sum after reduce-scatter, before all-reduce and hook.
        after_all: divisor at the end.
    """

    op: dist.ReduceOp.RedOpType
    before: float | None = None
    after_scatter: float | None = None
    after_all: float | None = None


def division_for(size: int, dtype: torch.dtype, factor: float | None, force_sum: bool) -> Division:
    """The division for `size` data-parallel ranks, with the same arithmetic in the same order as stock FSDP2.

    float32 and bfloat16 have range to spare: the mean is the collective's own AVG. Other dtypes could overflow in the
    sum or underflow in the division, so about sqrt(factor) is divided before the sum and the rest after.
    """
    if dtype in (torch.float32, torch.bfloat16) and not force_sum:
        if factor is not None:
            return Division(dist.ReduceOp.SUM, after_scatter=factor)
        return Division(dist.ReduceOp.AVG if size > 1 else dist.ReduceOp.SUM)
    total = float(size) if factor is None else factor
    if dtype in (torch.float32, torch.bfloat16):
        return Division(dist.ReduceOp.SUM, after_all=total)
    before = 1.0
    while total % before == 0 and total > before * before:
        before *= 2
    return Division(dist.ReduceOp.SUM, before=before, after_all=total / before)


class GradientReduction:
    """Reduces the gradients of one group's parameters. Holds plans.

    Args:
        mesh: its shard group reduce-scatters and its replicate groups all-reduce.
        params: the group's parameters, in an order that is the same on all ranks.
    """

    def __init__(self, mesh: DataParallelMesh, params: list[FSDPParam]) -> None:
        self.mesh = mesh
        self._params = params
        self._plans: dict[tuple[Any, ...], ReducePlan] = {}

    @property
    def has_partial(self) -> bool:
        """HSDP: whether a sum over the shard group waits for its all-reduce."""
        return bool(self.mesh.replicate_axes) and any(param.partial is not None for param in self._params)

    def take_gradients(self, settings: GroupSettings, *, alike: bool) -> tuple[list[FSDPParam], list[torch.Tensor]]:
        """Takes the unsharded gradients from their parameters, and returns both.

        With `alike` some were accumulated in the dtype of sums and some are fresh, which may differ by rank; they are
        cast to the same dtype.

        Raises:
            RuntimeError: for a sparse one; the message has the FQN.
        """
        zeros_if_unused, all_reduces = settings.reduce_unused_params, settings.all_reduce_grads
        taken = [param.take_gradient(zeros_if_unused, all_reduces) for param in self._params]
        params = [*compress(self._params, map(is_not, taken, repeat(None)))]
        gradients = [gradient for gradient in taken if gradient is not None]
        if not all(map(is_, map(_layout_of, gradients), repeat(torch.strided))):
            pairs = zip(params, gradients, strict=True)
            fqn, layout = next((one.fqn, own.layout) for one, own in pairs if own.layout is not torch.strided)
            raise RuntimeError(
                f"the gradient of parameter '{fqn}' is sparse ({layout}); expected a dense one, as ranks reduce rows "
                "in place. Build the embedding with sparse=False, or pass the parameter in ignored_params and reduce "
                "its gradient yourself"
            )
        if alike:
            gradients = [one.to(param.sums_dtype or one.dtype) for param, one in zip(params, gradients, strict=True)]
        return params, gradients

    def buckets(
        self,
        params: Sequence[FSDPParam],
        gradients: list[torch.Tensor],
        transport: Transport | None,
        settings: GroupSettings,
    ) -> list[Bucket]:
        """The gradients of each dtype, in an order that is the same on all ranks.

        Takes the gradients out of their list. Those of a single rank are delivered at once, without a bucket.
        """
        common = self._common_dtype(params, gradients) if GRAD_DTYPE_DECIDES else None
        dtypes = [*map(_dtype_of, gradients)]
        sums = [common or param.sums_dtype or dtype for param, dtype in zip(params, dtypes, strict=True)]
        kinds = [*zip(dtypes, sums, strict=True)]
        buckets = [
            Bucket(
                [*compress(params, map(eq, kinds, repeat(kind)))],
                [*compress(gradients, map(eq, kinds, repeat(kind)))],
                *kind,
                division_for(self.mesh.size, kind[1], settings.gradient_divide_factor, settings.force_sum_reduction),
            )
            for kind in dict.fromkeys(kinds)
        ]
        gradients.clear()
        if transport is None and not self.mesh.replicate_groups and settings.all_reduce_hook is None:
            for bucket in buckets:
                _deliver_unreduced(bucket)
            return []
        return buckets

    def _common_dtype(self, params: Sequence[FSDPParam], gradients: list[torch.Tensor]) -> torch.dtype:
        """The dtype that holds the sums of all `gradients` of a group, and partial sums that wait for an all-reduce."""
        dtypes = {param.sums_dtype or gradient.dtype for param, gradient in zip(params, gradients, strict=True)}
        dtypes.update(param.partial.dtype for param in params if param.partial is not None)
        return functools.reduce(torch.promote_types, dtypes)

    def program(self, bucket: Bucket, label: str, transport: Transport | None, settings: GroupSettings) -> Program:
        """The program that reduces `bucket` and delivers its sums. Packs its gradients now, on the current stream."""
        division = bucket.division
        if transport is None:
            sizes = [gradient.numel() for gradient in bucket.gradients]
            scatter = _copy_all(bucket.gradients, bucket.dtype, division, label)
            return self._reduced(bucket, scatter, lambda output: output.split(sizes), label, settings)
        plan = self._plan_for(bucket, label, transport)
        mean = Mean(division.op, division.before, division.after_scatter)
        scatter = plan.transport.reduce(plan, bucket.gradients, mean)
        return self._reduced(bucket, scatter, plan.output_views, label, settings)

    def _plan_for(self, bucket: Bucket, label: str, transport: Transport) -> ReducePlan:
        key = (bucket.grad_dtype, bucket.dtype, transport, *map(id, bucket.params))
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            items = [ReduceItem(param.fqn, param.layout) for param in bucket.params]
            places = {param: place for place, param in enumerate(self._params)}
            members = [places[param] for param in bucket.params]
            dtypes = bucket.grad_dtype, bucket.dtype
            plan = self._plans[key] = plan_reduce(items, transport, label, self.mesh.shard_rank, *dtypes, members)
        return plan

    def _reduced(
        self,
        bucket: Bucket,
        scatter: Reduction,
        views_of: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        label: str,
        settings: GroupSettings,
    ) -> Program:
        """Reduces over the shard group by `scatter`, which returns a flat tensor with a view for each parameter."""
        output = yield from scatter
        del scatter
        try:
            yield from self._all_reduced(bucket, output, views_of, label, settings)
        finally:
            note_freed(output, label, "reduce_output")

    def _all_reduced(
        self,
        bucket: Bucket,
        output: torch.Tensor,
        views_of: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        label: str,
        settings: GroupSettings,
    ) -> Program:
        division, params, views = bucket.division, bucket.params, views_of(output)
        groups = self.mesh.replicate_groups if settings.native_all_reduce else ()
        hook = settings.all_reduce_hook
        if groups and not settings.all_reduce_grads:
            for param, view in zip(params, views, strict=True):
                if param.partial is None:
                    param.partial = view
                else:
                    param.partial.add_(view)
            return
        for param, view in zip(params, views, strict=True) if self.has_partial else ():
            if param.partial is not None:
                view.add_(param.partial)
                param.partial = None
        if groups or hook is not None:
            # The next stage needs none of the gradients, and the next group's reduce-scatter need not wait for it.
            yield NEXT_STAGE
            hold(output)
        for group in groups:
            yield from all_reduce(output, group, division.op, label)
        if hook is not None:
            _run_hook(hook, output, settings.all_reduce_hook_stream)
        if division.after_all is not None and division.after_all != 1:
            output.div_(division.after_all)
        dtypes = {param.delivered_dtype or output.dtype for param in params}
        if len(dtypes) == 1 and output.dtype not in dtypes:
            views = views_of(output.to(dtypes.pop()))
        for param, view in zip(params, views, strict=True):
            param.deliver(view)


@dataclass
class Bucket:
    """Gradients of one dtype whose sums have one dtype, `dtype`, and their parameters."""

    params: list[FSDPParam]
    gradients: list[torch.Tensor]
    grad_dtype: torch.dtype
    dtype: torch.dtype
    division: Division


@torch.no_grad()
def _copy_all(gradients: list[torch.Tensor], dtype: torch.dtype, division: Division, label: str) -> Reduction:
    """The reduce-scatter of a single rank, which sends nothing."""
    hold(*gradients)
    sizes = [gradient.numel() for gradient in gradients]
    output = torch.empty(sum(sizes), dtype=dtype, device=gradients[0].device)
    note_allocated(output, label, "reduce_output")
    for part, gradient in zip(output.split(sizes), gradients, strict=True):
        part.copy_(gradient.reshape(-1))
    gradients.clear()
    for divisor in (division.before, division.after_scatter):
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


def _deliver_unreduced(bucket: Bucket) -> None:
    """A single rank, nothing to reduce: autograd's gradient becomes the sharded one without a copy."""
    division = bucket.division
    factors = [one for one in (division.before, division.after_scatter, division.after_all) if one not in (None, 1)]
    for param, gradient in zip(bucket.params, bucket.gradients, strict=True):
        reduced = gradient if gradient.dtype == bucket.dtype else gradient.to(bucket.dtype)
        for factor in factors:
            reduced = reduced / factor
        param.deliver(reduced)
