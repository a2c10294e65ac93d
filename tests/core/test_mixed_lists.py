"""foreach and fused optimizers on parameters that torch's operators do not take in one list."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core import Blocks, Owned, fully_shard
from tests.core.test_whole_state import step
from tests.support import rank_mesh, run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(10, 12)
        self.second = nn.Linear(12, 10)
        self.third = nn.Linear(10, 10, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.3))


MIXES: dict[str, Callable[[nn.Parameter], object]] = {
    "owned and shard": lambda p: Owned() if p.ndim == 2 else None,
    "rows and shard": lambda p: Blocks(rows=4) if p.ndim == 2 else None,
    "elements and owned": lambda p: Blocks(elements=7) if p.ndim == 2 else Owned(),
    "plain and shard": lambda p: None,
    "two meshes": lambda p: None,
}


class OwnAdamW(torch.optim.AdamW):
    """A subclass may do anything, so shardkit does not take it for element-wise."""

    steps_each_parameter_alone = True


def shard(mix: str, world_size: int) -> nn.Module:
    model, mesh = Net(), rank_mesh((world_size,))
    if mix == "two meshes":
        fully_shard(model.first, mesh=rank_mesh((1, world_size), ("replicate", "shard")))
    ignored = {model.third.weight} if mix == "plain and shard" else None
    return fully_shard(model, mesh=mesh, shard_placement_fn=MIXES[mix], ignored_params=ignored)


def _same(rank: int, world_size: int, kind: Any, options: dict[str, bool], mixes: list[str]) -> None:
    for mix in mixes:
        model, reference = shard(mix, world_size), Net()
        ours, theirs = (kind(one.parameters(), lr=0.01, **options) for one in (model, reference))
        for number in range(3):
            step(model, ours, number)
            step(reference, theirs, number)
        for parameter, value in zip(model.parameters(), reference.parameters(), strict=True):
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(full, value), (mix, parameter.shape)
            for state in ours.state[parameter].values():
                assert not state.ndim or type(state).__name__ == type(parameter).__name__.replace("Parameter", "Tensor")


@pytest.mark.parametrize("option", ["foreach", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, OwnAdamW])
def test_as_one_process(kind: Any, option: str) -> None:
    mixes = ["rows and shard"] if kind is OwnAdamW else list(MIXES)
    run_ranks(2, _same, kind, {option: True}, mixes)


def _refused(rank: int, world_size: int) -> None:
    for kind in (torch.optim.Adafactor, OwnAdamW):
        model = shard("owned and shard", world_size)
        optimizer = kind(model.parameters(), foreach=True)
        with pytest.raises(RuntimeError, match=r"'first\.weight' is a plain tensor.*'gain' with.*foreach=False"):
            step(model, optimizer, 0)
        apart = [[p for p in model.parameters() if (p.ndim == 2) == matrices] for matrices in (True, False)]
        optimizer = kind([{"params": apart[0]}, {"params": apart[1], "foreach": False}], foreach=True)
        if kind is OwnAdamW:
            step(model, optimizer, 0)


def test_what_torch_cannot_take_together_is_refused_by_name() -> None:
    run_ranks(2, _refused)
