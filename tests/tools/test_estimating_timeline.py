"""The timeline of an estimate, against the engine on the simulated device of `tests/simulation`, on the same jobs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.tools import Policies, TrainingJob, estimate_job
from shardkit.tools.estimating.trace import Operator
from shardkit.tools.machine import Link, Machine
from tests.simulation.conftest import on_device  # noqa: F401 - a fixture
from tests.simulation.scenarios import COMPARISONS, Comparison, measured
from tests.simulation.training import BLOCK, SHARDS
from tests.tools.machines import machine

MICROSECOND = 1e-6
SCENARIOS = {
    "base": Policies(),
    "slow links": Policies(),
    "HSDP": Policies(),
    "HSDP, slow between hosts": Policies(),
    "reshard_after_forward=False": Policies(reshard_after_forward=False),
    "gradient accumulation": Policies(accumulate=3),
    "deep, small groups": Policies(),
    "huge embedding": Policies(),
}


class _Compute(torch.autograd.Function):
    """The computation of the simulated device's blocks; `cos` and `sin` stand for the declared costs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cost: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, cost, *params)
        cost.cos()
        return x + sum(param.sum() for param in params)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, cost, *params = ctx.saved_tensors
        cost.sin()
        return gradient + x, None, *(param * gradient.sum() for param in params)


class Block(nn.Module):
    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec = spec
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in spec.shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cost = torch.zeros(int(10 * self.spec.forward), int(10 * self.spec.backward))
        return _Compute.apply(x, cost, *self.weights)


class Declared:
    """Only the costs that blocks declare take time: they are the shape of the argument of `cos` and `sin`."""

    def seconds(self, operator: Operator) -> float:
        name = operator.function._opname
        if name not in ("cos", "sin"):
            return 0.0
        return operator.args[0][0][name == "sin"] / 10 * MICROSECOND


def machine_of(comparison: Comparison) -> Machine:
    costs, shard = comparison.costs, BLOCK.numel * 4 / SHARDS
    between = shard / (costs.all_reduce * shard * MICROSECOND) if costs.all_reduce else 1e12
    inside = Link(1 / costs.all_gather / MICROSECOND, 0.0)
    links = {"inside": inside, "between": Link(between, 0.0)}
    return machine(memory=2**40, ranks_per_host=SHARDS, dtensor_seconds=0.0, dtensor_each_seconds=0.0, **links)


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_agrees_with_the_engine_on_streams(name: str, on_device: Callable[..., Any]) -> None:  # noqa: F811
    (comparison,) = (one for one in COMPARISONS if one.name == name)
    ours = on_device(measured, name, "ours")
    scenario = comparison.scenario

    def model() -> nn.Module:
        return nn.Sequential(*(Block(spec) for spec in scenario.blocks))

    policies = SCENARIOS[name]
    job = TrainingJob(model, lambda: torch.zeros(4), torch.optim.SGD, lambda out, _: out.sum(), policies=policies)
    mesh = {"dp_replicate": scenario.replicas, "dp_shard": SHARDS} if scenario.replicas > 1 else {"dp_shard": SHARDS}
    found = estimate_job(job, mesh, machine_of(comparison), costs=Declared())
    expected = ours.forward[-1] + ours.backward[-1]
    assert found.timeline.step / MICROSECOND == pytest.approx(expected, abs=0.01)
