"""torchao's tensor subclasses as sharded weights: the losses and weights of stock FSDP2, bit for bit."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import shardkit.core as shardkit
from tests.support import on_ranks, rank_mesh
from tests.support.heard import heard
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal

training = pytest.importorskip("torchao.prototype.quantized_training")
quantization = pytest.importorskip("torchao.quantization")
nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")


class LowRankLinear(nn.Module):
    """QLoRA: a frozen nf4 weight, and two small matrices that train."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nf4.to_nf4(torch.randn(width, width) / 16), requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, width) / 16)
        self.up = nn.Parameter(torch.randn(width, 4) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nf4.linear_nf4(x, self.weight) + F.linear(F.linear(x, self.down), self.up))


def _quantized(config: Any) -> nn.Sequential:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)])
    quantization.quantize_(model, config)
    return model


MODELS = {
    "int8": lambda: _quantized(training.int8_weight_only_quantized_training()),
    "int8 mixed precision": lambda: _quantized(training.int8_mixed_precision_training(module_swap=False)),
    "nf4": lambda: nn.Sequential(*[LowRankLinear(256) for _ in range(3)]),
}


def _train(api: Any, model: nn.Sequential, rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Tensor]:
    shard_each(*model, model, api=api, mesh=rank_mesh((world_size,)), **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    width = next(model.parameters()).shape[1]
    trace = {}
    torch.manual_seed(rank)  # int8 rounds its updates stochastically
    for step in range(5):
        x = torch.randn(24, width)
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        trace[f"step {step}: loss"] = loss.detach()
        for fqn, parameter in model.named_parameters():
            if parameter.requires_grad:
                trace[f"step {step}: gradient of {fqn}"] = parameter.grad.to_local().clone()
        optimizer.step()
        optimizer.zero_grad()
    trace["evaluated"] = model(torch.ones(17, width)).detach()
    for module in (model, *model):
        module.reshard()
    for fqn, parameter in model.named_parameters():
        trace |= _plain(fqn, parameter.to_local())
    return trace


def _plain(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if type(tensor) is Tensor:
        return {name: tensor.detach().clone()}
    inner, _ = tensor.__tensor_flatten__()
    return {f"{name}.{one}": getattr(tensor, one).clone() for one in inner} | {f"type of {name}": type(tensor)}


@pytest.mark.parametrize(
    ("kind", "dim", "reshard_after_forward"),
    [("int8", 0, True), ("int8 mixed precision", 0, False), ("int8 mixed precision", 1, True), ("nf4", 0, True)],
)
@on_ranks(2)
def test_training_like_stock(rank: int, world_size: int, kind: str, dim: int, reshard_after_forward: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    place = lambda parameter: Shard(min(dim, parameter.ndim - 1))  # noqa: E731
    options = {"reshard_after_forward": reshard_after_forward, "shard_placement_fn": place}
    expected, seen = (_train(api, copy.deepcopy(model), rank, world_size, options) for api in (stock, shardkit))
    assert_equal(seen, expected)
    assert expected["step 0: loss"] != expected["step 4: loss"]


@pytest.mark.parametrize("kind", MODELS)
@on_ranks(1)
def test_one_rank_like_one_process(rank: int, world_size: int, kind: str) -> None:
    """Stock hands on one of the hook's tensors only on a single rank, so the unsharded model is the reference."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    sharded = copy.deepcopy(model)
    shardkit.fully_shard(sharded, mesh=rank_mesh((world_size,)))
    for step in range(3):
        x = torch.randn(24, model[0][0].in_features if kind != "nf4" else 256)
        losses = [one(x).square().mean() for one in (model, sharded)]
        assert torch.equal(*losses), step
        for one, loss in zip((model, sharded), losses, strict=True):
            loss.backward()
            torch.manual_seed(step)
            torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.5).step()
            one.zero_grad()


@on_ranks(2)
def test_float8_gathers_a_byte_for_each_element(rank: int, world_size: int) -> None:
    """Equal batches on both ranks, so the unsharded model is the reference: stock cannot gather float8 with gloo."""
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(3)])
    sharded = copy.deepcopy(plain)
    for model in (plain, sharded):
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=model is sharded, emulate=True)
        float8.convert_to_float8_training(model, config=config)
    shard_each(*sharded, sharded)
    with heard(shardkit.events.GatherStarted) as started:
        for step in range(3):
            x = torch.randn(24, 64, generator=torch.Generator().manual_seed(step))
            losses = [(model(x) - x.sin()).square().mean() for model in (plain, sharded)]
            assert torch.equal(*losses), step
            for model, loss in zip((plain, sharded), losses, strict=True):
                loss.backward()
                torch.optim.SGD(model.parameters(), lr=0.5).step()
                model.zero_grad()
    assert {(one.bytes, one.wire_bytes, one.dtype) for one in started} == {(64 * 64, 64 * 32, torch.float8_e4m3fn)}
