"""Training in two and three dimensions, bit for bit as stock fully_shard does it, and as a single process does it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import shardkit.core as shardkit
from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.parity import sum_in_rank_order
from tests.support.trace import Trace, assert_same
from tests.tp_adapter.models import NAMES, OPTIMIZERS, SPECS, build, shard

MESHES = [(1, 2), (2, 1), (2, 2), (1, 4), (2, 1, 2), (1, 2, 2)]


@dataclass(frozen=True)
class Case:
    """One training run."""

    model: str
    mesh: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    frozen: bool = False
    micro_batches: int = 1
    optimizer: str = "adamw"

    def meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """The data-parallel mesh and the tensor-parallel one."""
        whole = rank_mesh(self.mesh, NAMES[len(self.mesh)])
        return whole["dp"] if len(self.mesh) == 2 else whole["dp_replicate", "dp_shard"], whole["tp"]

    def arguments(self, api: Any) -> dict[str, Any]:
        """The options, with names of policies turned into objects of this API."""
        # Before torch 2.15 stock sums over tensor parallelism in bf16, whatever reduce_dtype says.
        sums = torch.float32 if GRAD_DTYPE_DECIDES else None
        policies = {
            "bf16": api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=sums),
            "offload": api.CPUOffloadPolicy(pin_memory=False),
            "last dim": lambda parameter: Shard(parameter.ndim - 1),
        }
        return {name: policies.get(value, value) for name, value in self.options.items()}


def sharded(case: Case, api: Any) -> nn.Module:
    model = build(case.model)
    if case.frozen:
        model.blocks[0].up.requires_grad_(False)
        model.blocks[1].down.bias.requires_grad_(False)
    data, tensor = case.meshes()
    SPECS[case.model].parallelize(model, tensor)
    shard(model, api, data, **case.arguments(api))
    return model


def train(rank: int, case: Case, api: Any, full: bool) -> Trace:
    model = sharded(case, api)
    if api is stock:
        sum_in_rank_order(model)
    optimizer = OPTIMIZERS[case.optimizer](p for p in model.parameters() if p.requires_grad)
    data = case.meshes()[0]
    data_rank = sum(i * s for i, s in zip(data.get_coordinate(), (data.size(-1), 1)[-data.ndim :], strict=True))
    trace = Trace()
    for step in range(2):
        for micro in range(case.micro_batches):
            last = micro == case.micro_batches - 1
            model.set_requires_gradient_sync(last)
            loss = SPECS[case.model].loss(model, 100 * step + 10 * micro + data_rank)
            loss.backward()
            trace.add(f"step {step}.{micro}: loss", loss)
        trace.add_gradients(f"step {step}", model, full=full)
        optimizer.step()
        optimizer.zero_grad()
        trace.add_parameters(f"step {step}", model, full=full)
    trace.add_tree("state dict", dict(model.state_dict()))
    trace.add_tree("optimizer", optimizer.state_dict())
    return trace


def compare_with_stock(rank: int, world_size: int, case: Case) -> None:
    assert_same(train(rank, case, stock, full=True), train(rank, case, shardkit, full=True))


def cases() -> Iterator[Case]:
    for mesh in MESHES:
        yield Case("language", mesh)
    yield Case("tensor", (2, 2))
    yield Case("tied", (2, 2))
    yield Case("tied", (1, 2, 2))
    yield Case("tensor", (2, 2), frozen=True)
    yield Case("language", (2, 2), {"mp_policy": "bf16"})
    yield Case("language", (1, 2, 2), {"mp_policy": "bf16"}, micro_batches=2)
    yield Case("language", (2, 2), micro_batches=2, optimizer="sgd")
    yield Case("language", (2, 2), {"offload_policy": "offload"})
    yield Case("language", (2, 2), {"reshard_after_forward": False})
    yield Case("tensor", (2, 2), {"shard_placement_fn": "last dim"}, optimizer="sgd")
    yield Case("uneven", (2, 2), optimizer="sgd")
    yield Case("uneven_language", (2, 2))


def world(case: Case) -> int:
    size = 1
    for axis in case.mesh:
        size *= axis
    return size


def label(case: Case) -> str:
    words = [case.model, "x".join(map(str, case.mesh)), *map(str, case.options.values()), case.optimizer]
    return "-".join(
        [*words, *(["frozen"] if case.frozen else []), *([f"{case.micro_batches}"] * (case.micro_batches > 1))]
    )


BY_DAY = ((2, 2), (1, 2, 2), (2, 1, 2))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case.mesh in BY_DAY else pytest.mark.slow) for case in cases()], ids=label
)
def test_as_stock(case: Case):
    run_ranks(world(case), compare_with_stock, case)


@on_ranks(4)
def test_a_smaller_group_after_forward(rank: int, world_size: int) -> None:
    """Between forward and backward two neighbours keep the parameters; stock refuses that for DTensors."""
    whole, kept = (Case("tensor", (4, 1), {"reshard_after_forward": value}) for value in (True, 2))
    assert_same(train(rank, whole, shardkit, full=True), train(rank, kept, shardkit, full=True))


def train_with_loss_parallel(rank: int, api: Any) -> Trace:
    """The logits stay cut over the vocabulary up to the loss; a block's input is gathered on the way in."""
    mesh, model = rank_mesh((2, 2), NAMES[2]), build("language")
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.0": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
        "head": ColwiseParallel(use_local_output=False),
    }
    for index in range(2):
        plan |= {
            f"blocks.{index}.up": ColwiseParallel(use_local_output=False),
            f"blocks.{index}.down": RowwiseParallel(),
        }
    parallelize_module(model, mesh["tp"], plan)
    shard(model, api, mesh["dp"])
    if api is stock:
        sum_in_rank_order(model)
    trace = Trace()
    tokens = torch.randint(12, (2, 4), generator=torch.Generator().manual_seed(rank // 2))
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
    trace.add("loss", loss)
    trace.add_gradients("", model, full=True)
    return trace


@on_ranks(4)
def test_loss_parallel_and_prepared_inputs(rank: int, world_size: int) -> None:
    assert_same(train_with_loss_parallel(rank, stock), train_with_loss_parallel(rank, shardkit))


class Scaled(nn.Module):
    """A weight that is replicated over tensor parallelism, whose gradient is a pending sum there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).to_local().sum()


@pytest.mark.parametrize(("kind", "micro_batches"), [("shard", 2), ("offload", 2), ("owned", 1)])
@on_ranks(4)
def test_sums_over_tensor_parallelism_have_the_dtype_of_the_reduction(
    rank: int, world_size: int, kind: str, micro_batches: int
) -> None:
    options = {
        "shard": {},
        "offload": {"offload_policy": shardkit.CPUOffloadPolicy(pin_memory=False)},
        "owned": {"shard_placement_fn": lambda parameter: shardkit.Owned(1)},
    }[kind]
    whole = rank_mesh((2, 2), ("dp", "tp"))
    model = Scaled()
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, whole["tp"], [Replicate()]))
    policy = shardkit.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shardkit.fully_shard(model, mesh=whole["dp"], mp_policy=policy, **options)
    terms = torch.tensor([1.0, 2**-10])[whole["tp"].get_local_rank()]
    for micro in range(micro_batches):
        model.set_requires_gradient_sync(micro == micro_batches - 1)
        rows = DTensor.from_local(terms.expand(1, 4).bfloat16(), whole["tp"], [Shard(0)], run_check=False)
        model(rows).backward()
    expected = micro_batches * (1 + 2**-10)
    assert model.weight.grad.full_tensor().tolist() == [expected] * 4  # bf16 would give 1.0
