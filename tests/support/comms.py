"""Communication that parity needs: sums whose order is known. Same call signature as stock's and our custom comms."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class _Counting:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class RankOrderReduceScatter(_Counting):
    """A reduce-scatter that adds the ranks' inputs in rank order, and divides the sum last."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> None:
        self.calls += 1
        size, rank = group.size(), group.rank()
        inputs = [torch.empty_like(input_tensor) for _ in range(size)]
        dist.all_gather(inputs, input_tensor, group=group)
        total = inputs[0].chunk(size)[rank].clone()
        for other in inputs[1:]:
            total += other.chunk(size)[rank]
        if op == dist.ReduceOp.AVG:
            total /= size
        elif op != dist.ReduceOp.SUM:
            raise ValueError(f"RankOrderReduceScatter can SUM and AVG, not {op}")
        output_tensor.copy_(total.view_as(output_tensor))


class CountingAllGather(_Counting):
    """A plain all-gather that counts its calls."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.calls += 1
        outputs = list(output_tensor.chunk(group.size()))
        return dist.all_gather(outputs, input_tensor.contiguous(), group=group, async_op=async_op)
