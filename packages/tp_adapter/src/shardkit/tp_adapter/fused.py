"""`FusedColwiseParallel`: tensor parallelism of a linear layer whose weight is several logical tensors."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from shardkit.tp_adapter.sub_blocks import SubBlocks, check_sub_blocks, declare_sub_blocks

__all__ = ["FusedColwiseParallel"]


class FusedColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for an `nn.Linear` whose output features are several logical tensors of one size, stacked.

    Each rank gets its part of every logical tensor, and its output has these parts, in order, in its last dim::

        parallelize_module(feed_forward, mesh["tp"], {"gate_up": FusedColwiseParallel("gate", "up"), ...})
        gate, up = feed_forward.gate_up(x).chunk(2, dim=-1)  # of this rank, sizes divided by the ranks of "tp"

    Apply it before `fully_shard`, which then sees to it that sharded parameters, state dicts and checkpoints have the
    weight whole and in its own order (see Note [Fused weights] in `sub_blocks`). The DTensor that the layer computes
    with, which the module holds while it is gathered and before it is sharded, is no such: its `full_tensor()` has the
    parts in the order of ranks. Read `state_dict()`, or the weight after `reshard()`.

    Args:
        names: of the logical tensors, in the order in which they are stacked.
        input_layouts: as for `ColwiseParallel`.

    Raises:
        ValueError: when applied, if the output features are not so many equal parts that the ranks divide. At once for
            `output_layouts` or `use_local_output`: the output of the ranks together is in the order of ranks, so as a
            DTensor, or gathered, it would mix the logical tensors.
        TypeError: when applied to another module than `nn.Linear`.
    """

    def __init__(
        self,
        *names: str,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        if output_layouts not in (None, Shard(-1)) or not use_local_output:
            raise ValueError(
                f"FusedColwiseParallel{names} got {output_layouts=}, {use_local_output=}; its output is a plain "
                "tensor, this rank's part of each logical tensor, and gathered they would be mixed. Take them apart "
                "with chunk and gather each, or keep them as layers of their own under ColwiseParallel"
            )
        super().__init__(input_layouts=input_layouts)
        self.sub_blocks = SubBlocks(names)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise TypeError(f"FusedColwiseParallel is for nn.Linear, got {type(module).__name__}")
        ranks, parts = device_mesh.size(), len(self.sub_blocks.names)
        described = f"FusedColwiseParallel{self.sub_blocks.names} of {module}: "  # torch tells a style no name
        for name, parameter in list(module.named_parameters(recurse=False)):
            check_sub_blocks(parameter, f"{described}'{name}'", self.sub_blocks)
            if parameter.shape[0] % (parts * ranks):
                raise ValueError(
                    f"{described}'{name}' of shape {tuple(parameter.shape)} is made of {self.sub_blocks.names}, each "
                    f"of {parameter.shape[0] // parts} on dim 0, which {ranks} ranks do not divide"
                )
            with torch.no_grad():
                grouped = nn.Parameter(_by_rank(parameter, parts, ranks), requires_grad=parameter.requires_grad)
            module.register_parameter(name, grouped)
        result: nn.Module = super()._apply(module, device_mesh)
        for name, _ in result.named_parameters(recurse=False):
            declare_sub_blocks(result, name, self.sub_blocks)
        return result


def _by_rank(whole: torch.Tensor, parts: int, ranks: int) -> torch.Tensor:
    """Rows reordered so that equal chunks have every rank's rows of each part: g0 g1 u0 u1 becomes g0 u0 g1 u1."""
    grouped = whole.reshape(parts, ranks, -1, *whole.shape[1:]).transpose(0, 1)
    return grouped.reshape(whole.shape).contiguous()
