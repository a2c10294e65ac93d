"""The timeline of an estimate: against the engine on the simulated device, by hand, and against published times."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn

from shardkit.tools import Policies, TrainingJob, estimate_job
from shardkit.tools.estimating.timeline import Roofline, replay, transfer_seconds
from shardkit.tools.estimating.trace import Awaited, Dispatched, Operator, Ran, Trace, Transfer
from shardkit.tools.machine import Efficiency, Link, Machine, preset
from tests.simulation.conftest import on_device  # noqa: F401 - a fixture
from tests.simulation.scenarios import COMPARISONS, Comparison, measured
from tests.simulation.training import BLOCK, SHARDS
from tests.tools.published import DATA, errors, memory_errors

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


def simple(**changes: Any) -> Machine:
    """Of two devices that reach their peaks and take no time for anything else."""
    given = {
        "name": "simple", "device": "cuda", "transport": "nccl", "flops": {"float32": 1.0}, "memory_bandwidth": 1.0,
        "memory": 1000, "ranks_per_host": 2, "inside": Link(10.0, 1.0), "between": Link(1.0, 3.0),
        "efficiency": Efficiency(1.0, 1.0, 1.0), "operator_seconds": 0.0, "storage_bandwidth": 1.0, "process_bytes": 0,
    }  # fmt: skip
    return Machine(**given | changes)


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
    return simple(memory=2**40, ranks_per_host=SHARDS, dtensor_seconds=0.0, dtensor_each_seconds=0.0, **links)


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_agrees_with_the_engine_on_streams(name: str, on_device: Callable[..., Any]) -> None:  # noqa: F811
    comparison = COMPARISONS[name]
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


MACHINE = simple(flops={"float32": 100.0}, memory_bandwidth=10.0, dtensor_seconds=3.0, dtensor_each_seconds=0.5)


def operator(flops: int, nbytes: int) -> Operator:
    return Operator(None, (), {}, torch.float32, flops, nbytes)


def gather(nbytes: int, ranks: int = 2, hosts: int = 1, collective: str = "all-gather", **named) -> Transfer:
    sizes = nbytes, nbytes, 0, torch.float32, ranks, hosts
    return Transfer(collective, "block", "forward", *sizes, of_core=True, **named)


@pytest.mark.parametrize(("flops", "nbytes", "seconds"), [(200, 10, 2.0), (200, 100, 10.0), (0, 50, 5.0), (0, 0, 0.0)])
def test_an_operator_takes_its_arithmetic_or_its_traffic(flops: int, nbytes: int, seconds: float):
    assert Roofline(MACHINE).seconds(operator(flops, nbytes)) == seconds


def test_a_transfer_takes_its_slowest_link():
    gloo = MACHINE.replace(transport="gloo")
    assert transfer_seconds(gather(100), gloo) == 100 / 2 / 10 + 1
    # Four ranks on two hosts: half of the bytes come from outside, over two adapters.
    assert transfer_seconds(gather(100, 4, 2), gloo) == 100 / 2 / 2 + 2 * 3
    assert transfer_seconds(gather(100, collective="all-reduce"), gloo) == 2 * transfer_seconds(gather(100), gloo)
    assert transfer_seconds(gather(100, ranks=1), MACHINE) == 0


def test_nccl_takes_the_protocol_and_the_algorithm_that_suit_the_size():
    a100 = preset("a100")
    inside, between = a100.inside.bandwidth, a100.between.bandwidth
    large = gather(2**30, ranks=8)
    assert transfer_seconds(large, a100) == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 2**30 * 7 / 8 / inside)
    small = gather(2**10, ranks=8)  # LL: shorter steps, and a quarter of the bandwidth
    assert transfer_seconds(small, a100) == pytest.approx(3.6e-6 + 7 * 0.47e-6 + 4 * 2**10 * 7 / 8 / inside)
    hosts = gather(2**30, ranks=64, hosts=8)
    steps = 8.4e-6 + 56 * 3.4e-6 + 7 * 9.6e-6
    assert transfer_seconds(hosts, a100) == pytest.approx(steps + 2**30 * 7 / 8 / (8 * between))
    # Over a ring of 1,024 ranks steps take milliseconds; a tree has few.
    wide = gather(2**12, ranks=1024, hosts=128, collective="all-reduce")
    assert transfer_seconds(wide, a100) < 2 * (1024 - 128) * 0.47e-6 / 4


def test_classes_of_operators_reach_different_parts_of_the_peak():
    costs = Roofline(MACHINE.replace(efficiency=Efficiency(matmul=0.5, attention=0.25, memory=0.1)))
    assert costs.seconds(operator(200, 0)) == 4
    assert costs.seconds(replace(operator(200, 0), attention=True)) == 8
    assert costs.seconds(operator(0, 10)) == 10


def trace(*steps: object) -> Trace:
    return Trace(list(steps))


def test_communication_hides_behind_computation():
    long, short = operator(1000, 0), operator(100, 0)
    line = replay(trace(gather(100, about=1), Ran(long, "a", "f"), Awaited(1, "b", "f")), MACHINE, Roofline(MACHINE))
    assert (line.step, line.exposed, line.communication) == (10, 0, 6)
    line = replay(trace(gather(100, about=1), Ran(short, "a", "f"), Awaited(1, "b", "f")), MACHINE, Roofline(MACHINE))
    assert (line.step, line.exposed, line.exposed_by_fqn) == (6, 5, {"block": 5})
    assert line.compute_by_fqn == {"a": 1}


def test_shared_memory_is_copied_by_the_rank_itself():
    cpu = MACHINE.replace(device="cpu", transport="shared")
    steps = trace(gather(100, about=1), Ran(operator(1000, 0), "a", "f"), Awaited(1, "b", "f"))
    line = replay(steps, cpu, Roofline(cpu))
    assert (line.step, line.exposed) == (16, 6)


def test_launches_bound_a_device_that_has_little_to_do():
    slow = MACHINE.replace(operator_seconds=2.0)
    steps = trace(*[Ran(operator(100, 0), "a", "f")] * 5)
    assert replay(steps, slow, Roofline(slow)).step == 5 * 2 + 1
    assert replay(steps, slow.replace(device="cpu"), Roofline(slow)).step == 5 * (2 + 1)


def test_operators_on_dtensors_take_host_time_for_themselves_and_for_each_tensor():
    steps = trace(Dispatched(4, "a", "f"), Ran(operator(100, 0), "a", "f"))
    line = replay(steps, MACHINE.replace(device="cpu"), Roofline(MACHINE))
    assert (line.step, line.compute_by_fqn) == (3 + 4 * 0.5 + 1, {"a": 6})
    assert replay(trace(Ran(operator(1000, 0), "a", "f"), *steps.steps), MACHINE, Roofline(MACHINE)).step == 11


def test_what_is_rounded_takes_the_time_of_its_bytes_on_the_wire():
    rounded = structs.replace(gather(100), wire_bytes=20, compressed=True)
    assert transfer_seconds(rounded, MACHINE) == 40 / 2 / 10 + 1


def test_every_figure_has_a_source():
    assert all(run["source"] in DATA["sources"] and run["model"] in DATA["models"] for run in DATA["runs"])
    assert len([run for run in DATA["runs"] if not run.get("fitted")]) >= 8


@pytest.mark.slow
def test_the_median_error_of_step_times_stays_within_fifteen_per_cent():
    found = errors([run for run in DATA["runs"] if not run.get("fitted")])
    assert statistics.median(map(abs, found)) < 0.15, found


@pytest.mark.slow
def test_the_median_error_of_memory_stays_within_five_per_cent():
    found = memory_errors(DATA["runs"])
    assert len(found) >= 2 and statistics.median(map(abs, found)) < 0.05, found
