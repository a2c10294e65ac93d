"""`placements_for` with the optimizers that people use: each, unmodified, steps as in one process, bit for bit."""

import contextlib
import io
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardkit.core import Blocks, Owned, fully_shard, optimizer_step_on_shards, placements_for
from shardkit.core.parameters.region import region_of
from shardkit.core.torch_compat import like_dtensor, local_of
from tests.support import rank_mesh, run_ranks

# package: class -> where it wants matrices
KINDS: dict[str, type[Any] | None] = {
    "torch.optim:Muon": Owned,
    "torch.optim:Adafactor": Owned,
    "torch.optim:AdamW": None,
    "torch.optim:SGD": None,
    "torch.optim:Adagrad": None,
    "torch.optim:RMSprop": None,
    "torchao.optim:AdamW8bit": Blocks,
    "torchao.optim:Adam4bit": Blocks,
    "torchao.optim:AdamWFp8": Blocks,
    "bitsandbytes.optim:AdamW8bit": Blocks,
    "bitsandbytes.optim:Lion8bit": Blocks,
    "bitsandbytes.optim:RMSprop8bit": Blocks,
    "bitsandbytes.optim:PagedAdamW8bit": Blocks,
    "bitsandbytes.optim:AdEMAMix8bit": Owned,
    "pytorch_optimizer:SOAP": Owned,
    "pytorch_optimizer:Shampoo": Owned,
    "pytorch_optimizer:ScalableShampoo": Owned,
    "pytorch_optimizer:CAME": Owned,
    "pytorch_optimizer:SPlus": Owned,
    "pytorch_optimizer:SCION": Owned,
    "heavyball:SOAP": Owned,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(70, 64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64, bias=False)
        self.head = nn.Linear(64, 70, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("gradients are given")


def class_of(kind: str) -> Any:
    module, name = kind.split(":")
    package = pytest.importorskip(module)
    if module == "heavyball":
        package.utils.compile_mode = None
        package.SOAP.steps_each_parameter_alone = True
    return getattr(package, name)


def trainees(model: nn.Module, kind: str) -> list[nn.Parameter]:
    """The parameters to train: for Muon and the like, the matrices between embedding and head."""
    if KINDS[kind] is Owned and "8bit" not in kind:
        return [model.up.weight, model.down.weight]
    return list(model.parameters())


def make(model: nn.Module, kind: str) -> Any:
    options = {"momentum": 0.9} if kind.endswith("SGD") else {}
    with contextlib.redirect_stdout(io.StringIO()):
        return class_of(kind)(trainees(model, kind), lr=0.01, **options)


def give(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.grad = gradient
        return
    mine = region_of("a gradient", parameter).take(gradient).reshape(local_of(parameter).shape)
    parameter.grad = like_dtensor(mine.clone(), parameter)


def _steps(rank: int, world_size: int, kind: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    reference = Net()
    torch.manual_seed(1)
    model = Net()
    choose = placements_for(model, class_of(kind))
    fully_shard(model, mesh=rank_mesh((world_size,)), shard_placement_fn=choose)
    wanted = KINDS[kind]
    for parameter in (model.up.weight, model.down.weight):
        assert isinstance(parameter.placements[0], wanted or Shard)
    ours, theirs = make(model, kind), make(reference, kind)
    if wanted is None:
        optimizer_step_on_shards(ours)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
            gradient = torch.randn(whole.shape, generator=generator) / math.sqrt(whole.numel())
            give(mine, gradient)
            give(whole, gradient.clone())
        for optimizer in (ours, theirs):
            torch.manual_seed(step)
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
            optimizer.zero_grad()
        for (name, mine), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), whole), (step, name)


@pytest.mark.parametrize("kind", KINDS)
def test_common_optimizers_step_as_in_one_process(kind: str) -> None:
    class_of(kind)
    run_ranks(3, _steps, kind)
