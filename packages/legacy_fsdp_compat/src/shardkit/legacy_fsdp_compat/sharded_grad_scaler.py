"""ShardedGradScaler: a gradient scaler whose ranks agree on whether a gradient overflowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardkit.core.parameters.param import sharded_counterpart
from shardkit.core.torch_compat import local_of
from shardkit.legacy_fsdp_compat.torch_compat import unscale_and_check_

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded gradients: each rank checks its shards, then all of them decide together.

    Args:
        device: type of the device that the scale lives on.
        init_scale: as for `torch.amp.GradScaler`.
        backoff_factor: likewise.
        growth_factor: likewise.
        growth_interval: likewise.
        enabled: likewise.
        process_group: the ranks that share the parameters; default: all.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, or any nesting of losses, by the scale. Each keeps its dtype, even a 0-dim float16 one."""
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if not isinstance(outputs, Iterable):
            return super().scale(outputs)  # raises
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Divides the gradients by the scale, including float16 ones (collective: one all-reduce of a flag)."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if (param := sharded_counterpart(parameter)) is not None:
                param.refuse_pending("gradients are unscaled")
            gradient: Any = parameter.grad
            if gradient is None:
                continue
            local = local_of(gradient) if isinstance(gradient, DTensor) else gradient
            if local.is_sparse:
                parameter.grad = local.coalesce()  # a new tensor if it had an index twice
                local = parameter.grad.values()
            by_kind.setdefault((local.device, local.dtype), []).append(local)
        with torch.no_grad():
            for (device, _), gradients in by_kind.items():
                found = torch.zeros_like(found_inf, device=device)
                unscale_and_check_(gradients, found, inv_scale.to(device))
                found_inf += found.to(found_inf.device)
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self.process_group)
        return {found_inf.device: found_inf}
