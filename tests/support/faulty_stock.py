"""Stock ``fully_shard`` with one fault each, for the parity harness to catch: ``module:attribute`` in a Case."""

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.tensor import Shard

from tests.support.comms import RankOrderReduceScatter


class _FaultyReduceScatter(RankOrderReduceScatter):
    """Reduces as told, then spoils the result."""

    def __init__(self, factor: float = 1.0, offset: float = 0.0) -> None:
        super().__init__()
        self.factor, self.offset = factor, offset

    def __call__(self, output_tensor, input_tensor, group, op=dist.ReduceOp.SUM, async_op=False) -> None:
        super().__call__(output_tensor, input_tensor, group, op)
        output_tensor.mul_(self.factor)
        output_tensor.view(-1)[:1] += self.offset


def _with_reduction(**fault: float) -> SimpleNamespace:
    def fully_shard(module: nn.Module, **options: Any) -> nn.Module:
        stock.fully_shard(module, **options)
        module.set_custom_reduce_scatter(_FaultyReduceScatter(**fault))
        return module

    return _like_stock(fully_shard)


def _like_stock(fully_shard: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(stock), "fully_shard": fully_shard})


def _shard_elsewhere(module: nn.Module, **options: Any) -> nn.Module:
    """Shards one matrix of each call on its other dim."""
    chosen = next((p for p in module.parameters() if p.ndim == 2 and p.shape[1] % dist.get_world_size() == 0), None)
    return stock.fully_shard(module, shard_placement_fn=lambda p: Shard(1) if p is chosen else None, **options)


def _stretch_blocks(module: nn.Module, **options: Any) -> nn.Module:
    """Multiplies the output of every block, not of the root, by a little more than one."""
    stock.fully_shard(module, **options)
    if not any(isinstance(child, nn.ModuleList) for child in module.children()):
        module.register_forward_hook(lambda module, inputs, output: output * (1 + 2**-20))
    return module


doubled_gradients = _with_reduction(factor=2.0)
one_element_off = _with_reduction(offset=1e-3)
wrong_placement = _like_stock(_shard_elsewhere)
slightly_wrong_output = _like_stock(_stretch_blocks)
