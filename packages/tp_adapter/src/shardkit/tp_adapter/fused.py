"""`FusedColwiseParallel`: tensor parallelism of a linear layer whose weight consists of several logical tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from shardkit.tp_adapter.declared import check_whole_groups, declare_sub_blocks
from shardkit.tp_adapter.sub_blocks import SubBlocks, check_sub_blocks

__all__ = ["FusedColwiseParallel"]


class FusedColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for an `nn.Linear` whose output features form several logical tensors.

    Without `sizes` they are stacked and equally large. Each rank gets its part of every logical tensor, and the last
    dim of its output has these parts in order::

        parallelize_module(feed_forward, mesh["tp"], {"gate_up": FusedColwiseParallel("gate", "up"), ...})
        gate, up = feed_forward.gate_up(x).chunk(2, dim=-1)  # of this rank, sizes divided by the ranks of "tp"

    With `sizes` they are packed group by group (see `SubBlocks`), and each rank gets whole groups, as with a plain
    `ColwiseParallel`::

        sizes = (heads // kv_heads * head_size, head_size, head_size)
        parallelize_module(attention, mesh["tp"], {"qkv": FusedColwiseParallel("q", "k", "v", sizes=sizes), ...})
        groups = attention.qkv(x).unflatten(-1, (-1, sum(sizes)))  # of this rank
        q, k, v = groups.split(sizes, dim=-1)

    Apply it before `fully_shard`, so that sharded parameters, state dicts and checkpoints hold the whole weight in its
    own order (see Note [Fused weights] in `sub_blocks`). For a stack, do not read the DTensor that the module holds
    while it is gathered, or before it is sharded: its `full_tensor()` has the parts in the order of ranks. Read
    `state_dict()`, or the weight after `reshard()`.

    Args:
        names: names of the logical tensors, in their order in the stack or group.
        sizes: output features of each logical tensor in one group.
        input_layouts: as for `ColwiseParallel`.
        output_layouts: as for `ColwiseParallel`, with `sizes` only.
        use_local_output: as for `ColwiseParallel`, with `sizes` only.

    Raises:
        ValueError: when applied, if the output features cannot be divided into equal parts that the ranks divide, or
            into whole groups. At once, for `output_layouts` or `use_local_output` of a stack: the combined output is in
            the order of ranks, so as a DTensor, or gathered, it would mix the logical tensors.
        TypeError: when applied to a module other than `nn.Linear`.
    """

    def __init__(
        self,
        *names: str,
        sizes: Sequence[int] | None = None,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        if sizes is None and (output_layouts not in (None, Shard(-1)) or not use_local_output):
            raise ValueError(
                f"FusedColwiseParallel{names} got {output_layouts=}, {use_local_output=}; its output is a plain "
                "tensor, this rank's part of each logical tensor, and gathered they would be mixed. Take them apart "
                "with chunk and gather each, or keep them as layers of their own under ColwiseParallel"
            )
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.sub_blocks = SubBlocks(names, sizes=None if sizes is None else tuple(sizes))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise TypeError(f"FusedColwiseParallel is for nn.Linear, got {type(module).__name__}")
        ranks, blocks = device_mesh.size(), self.sub_blocks
        for name, parameter in list(module.named_parameters(recurse=False)):
            described = f"FusedColwiseParallel{blocks.names} of {module}: '{name}'"  # torch passes no parameter name
            check_sub_blocks(parameter, described, blocks)
            if blocks.sizes is not None:
                check_whole_groups(described, parameter.shape, blocks, [(ranks, Shard(0))])
                continue
            described += f" of shape {tuple(parameter.shape)}"
            with torch.no_grad():
                grouped = _by_rank(described, parameter, blocks, ranks)
            module.register_parameter(name, nn.Parameter(grouped, requires_grad=parameter.requires_grad))
        result: nn.Module = super()._apply(module, device_mesh)
        for name, _ in result.named_parameters(recurse=False):
            declare_sub_blocks(result, name, blocks)
        return result


def _by_rank(described: str, whole: torch.Tensor, blocks: SubBlocks, ranks: int) -> torch.Tensor:
    """Reorders rows so that equal chunks hold every rank's rows of each part: g0 g1 u0 u1 becomes g0 u0 g1 u1."""
    parts = len(blocks.names)
    if whole.shape[0] % (parts * ranks):
        raise ValueError(
            f"{described} is made of {blocks.names}, each of {whole.shape[0] // parts} on dim 0, which {ranks} ranks "
            "do not divide; use a number that does"
        )
    grouped = whole.reshape(parts, ranks, -1, *whole.shape[1:]).transpose(0, 1)
    return grouped.reshape(whole.shape).contiguous()
