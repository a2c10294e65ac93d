"""The stock way to gather and reduce a parameter group: one collective over one buffer, copies on both sides.

Written down from its outline (copy in, collective, copy out), with c10d's public collectives and torch's own fused
copies, so that a part can be measured without the machinery around it.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

# torch 2.13 renames both; the old names warn there.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(chunks: Sequence[torch.Tensor], world_size: int) -> list[torch.Tensor]:
    """Full flat tensors of equally sized 1-D `chunks`. Collective over the default group."""
    sizes = [chunk.numel() for chunk in chunks]
    buffer = chunks[0].new_empty(world_size, sum(sizes))
    own = buffer[dist.get_rank()]
    torch._foreach_copy_(list(own.split(sizes)), list(chunks))
    _gather_single(buffer.view(-1), own)
    full = [chunk.new_empty(world_size, chunk.numel()) for chunk in chunks]
    torch.split_with_sizes_copy(buffer, sizes, dim=1, out=full)
    return [tensor.view(-1) for tensor in full]


def reduce(grads: Sequence[torch.Tensor], world_size: int, reduce_dtype: torch.dtype) -> list[torch.Tensor]:
    """This rank's chunks of the mean of flat `grads`, whose sizes the world size divides. Collective."""
    sizes = [grad.numel() // world_size for grad in grads]
    buffer = grads[0].new_empty(world_size, sum(sizes), dtype=reduce_dtype)
    offsets = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    for grad, (begin, end) in zip(grads, pairwise(offsets), strict=True):
        buffer[:, begin:end].copy_(grad.view(world_size, -1))
    output = buffer.new_empty(sum(sizes))
    _reduce_single(output, buffer.view(-1), op=dist.ReduceOp.SUM)
    return list(output.div_(world_size).split(sizes))
