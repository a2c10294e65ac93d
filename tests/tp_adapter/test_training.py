"""Training in two and three dimensions, bit for bit as stock fully_shard does it."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn
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
from tests.support.features import Feature
from tests.support.models import Composed, ModelSpec
from tests.support.parity import CANDIDATE, Case, compare_training, sum_in_rank_order, train
from tests.support.trace import Trace, assert_same
from tests.tp_adapter.models import NAMES, SPECS, axes, build, shard


@dataclass(frozen=True)
class Parallel(Case):
    """A run of the harness on a mesh whose last axis is tensor-parallel; ranks along it get the same data."""

    mesh: tuple[int, ...] = (2, 2)
    frozen: bool = False
    gather: bool = True

    @property
    def spec(self) -> ModelSpec:
        given = SPECS[self.model]

        def built() -> nn.Module:
            model = given.build()
            if self.frozen:
                model.blocks[0].up.requires_grad_(False)
                model.blocks[1].down.bias.requires_grad_(False)
            return model

        return ModelSpec(
            built,
            lambda generator: (given.inputs(generator),),
            lambda output: (output - 0.5).square().mean(),
            lambda model: [*model.blocks],
        )

    @property
    def chosen(self) -> list[Feature]:
        def apply(model: nn.Module, api: Any, spec: ModelSpec, options: dict[str, Any]) -> None:
            data, tensor = axes(self.mesh)
            SPECS[self.model].parallelize(model, tensor)
            shard(model, api, data, **options)

        return [*super().chosen, Feature("apply", apply=apply)]

    def __str__(self) -> str:
        kinds = [*self.features, *(["frozen"] if self.frozen else [])]
        return "-".join([self.model, "x".join(map(str, self.mesh)), *kinds, self.optimizer])


def compare(rank: int, world_size: int, case: Parallel) -> None:
    compare_training(axes(case.mesh)[0].mesh.flatten().tolist().index(rank), world_size, case)


# Before torch 2.15 stock sums over tensor parallelism in bf16, whatever reduce_dtype says.
BF16 = "bfloat16_reduce_float32" if GRAD_DTYPE_DECIDES else "bfloat16"
CASES = [
    Parallel("language"),
    Parallel("language", ("offload",), mesh=(2, 1, 2)),
    Parallel("language", ("no_reshard",), "adamw", mesh=(1, 2, 2)),
    *(pytest.param(Parallel("language", mesh=mesh), marks=pytest.mark.slow) for mesh in [(1, 2), (2, 1), (1, 4)]),
    Parallel("tied"),
    Parallel("tied", mesh=(1, 2, 2)),
    Parallel("tensor", frozen=True, optimizer="adamw"),
    Parallel("language", (BF16, "accumulate_no_sync"), "adamw"),
    Parallel("tensor", ("dim_1",)),
    Parallel("uneven"),
    Parallel("uneven_language", optimizer="adamw"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_stock(case: Parallel):
    run_ranks(math.prod(case.mesh), compare, case)


@on_ranks(4)
def test_a_smaller_group_after_forward(rank: int, world_size: int) -> None:
    """Between forward and backward two neighbours keep the parameters; stock refuses that for DTensors."""
    whole, kept = (Parallel("tensor", features, mesh=(4, 1)) for features in ((), ("reshard_to_2",)))
    assert_same(train(rank, 4, whole, CANDIDATE), train(rank, 4, kept, CANDIDATE))


def train_with_loss_parallel(rank: int, api: Any) -> Trace:
    """The logits stay cut over the vocabulary up to the loss; a block's input is gathered on the way in."""
    mesh, model = rank_mesh((2, 2), NAMES[2]), build("language")
    plan: dict[str, Any] = {
        "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.0": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
        "head": ColwiseParallel(use_local_output=False),
        "blocks.*.up": ColwiseParallel(use_local_output=False),
        "blocks.*.down": RowwiseParallel(),
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


@pytest.mark.parametrize("kind", ["shard", "offload"])
@on_ranks(4)
def test_sums_over_tensor_parallelism_have_the_dtype_of_the_reduction(rank: int, world_size: int, kind: str) -> None:
    """Of a weight that is replicated there, so that its gradient is a pending sum."""
    options = {"offload_policy": shardkit.CPUOffloadPolicy(pin_memory=False)} if kind == "offload" else {}
    whole = rank_mesh((2, 2), ("dp", "tp"))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), whole["tp"], [Replicate()]))
    model: Any = Composed(lambda m, x: (x * m.weight).to_local().sum(), weight=weight)
    policy = shardkit.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shardkit.fully_shard(model, mesh=whole["dp"], mp_policy=policy, **options)
    terms = torch.tensor([1.0, 2**-10])[whole["tp"].get_local_rank()]
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        rows = DTensor.from_local(terms.expand(1, 4).bfloat16(), whole["tp"], [Shard(0)], run_check=False)
        model(rows).backward()
    expected = 2 * (1 + 2**-10)
    assert model.weight.grad.full_tensor().tolist() == [expected] * 4  # bf16 would give 1.0
