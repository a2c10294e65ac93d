"""CPU offload: what goes from the host to the device is the shard itself, in its own dtype."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch

from shardkit.core import CPUOffloadPolicy
from tests.simulation.configurations import CONFIGURATIONS, ODD, optimize
from tests.simulation.device import Access, Allocation, Observer
from tests.simulation.training import started, take_steps

Transfer: TypeAlias = tuple[list[tuple[int, int]], bytes]
"""Where a copy to the device read pinned memory, with the number of bytes, and what has arrived."""


class _Transfers(Observer):
    def __init__(self) -> None:
        self.seen: list[Transfer] = []

    def ran(self, name: str, stream: int, accesses: Sequence[Access]) -> None:
        if name == "host_to_device":
            read = [_place(access) for access in accesses if not access.write]
            (written,) = (_place(access) for access in accesses if access.write)
            self.seen.append((read, ctypes.string_at(*written)))


def _place(access: Access) -> tuple[int, int]:
    return access.allocation.at + access.begin, access.end - access.begin


def _fill(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))


def transfers(name: str) -> tuple[list[Transfer], list[Transfer]]:
    """The copies to the device in the last step, and what a copy of each shard is."""
    (scenario,) = (one.scenario for one in CONFIGURATIONS if one.name == name)
    observer = _Transfers()
    with started(replace(scenario, build=_fill), "ours", observer, lambda: 0.0) as run:
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for step in take_steps(run):
            if step < scenario.steps - 1:
                optimize(run)
                observer.seen.clear()
        shards = [parameter.to_local() for parameter in run.model.parameters()]
        assert all(shard.dtype == torch.float32 and shard.is_pinned() for shard in shards)
        places = [(shard.data_ptr(), shard.nbytes) for shard in shards]
        return observer.seen, [([place], ctypes.string_at(*place)) for place in places]


@pytest.mark.parametrize("name", ["CPU offload", "CPU offload, bf16"])
def test_shards_cross_to_the_device_as_they_are(name: str, on_device: Callable[..., Any]) -> None:
    """Casts run on the device, after the copy: a host that casts would spend its time and memory on it."""
    seen, shards = on_device(transfers, name)
    assert all(any(arrived) for _, arrived in shards)
    last = len(ODD.shapes)  # the parameters of the last group, which stays unsharded until backward
    assert sorted(seen) == sorted(2 * shards[:-last] + shards[-last:])


class _Arrivals(Observer):
    """The memory on the device that copies from the host were written to."""

    def __init__(self) -> None:
        self.memory: list[Allocation] = []

    def ran(self, name: str, stream: int, accesses: Sequence[Access]) -> None:
        if name == "host_to_device":
            self.memory += [access.allocation for access in accesses if access.write]


def kept(name: str) -> tuple[int, int]:
    """How many shards were copied to the device in the last step, and how many of these copies are left after it."""
    (scenario,) = (one.scenario for one in CONFIGURATIONS if one.name == name)
    observer = _Arrivals()
    with started(scenario, "ours", observer, lambda: 0.0) as run:
        for _ in take_steps(run):
            copied, left = len(observer.memory), sum(one.died is None for one in observer.memory)
            observer.memory.clear()
        return copied, left


def test_no_shard_stays_on_the_device_between_steps(on_device: Callable[..., Any]) -> None:
    copied, left = on_device(kept, "CPU offload")
    assert copied
    assert not left


def homes(name: str, options: dict[str, Any]) -> tuple[list[str], list[str], int]:
    """Where shards and their gradients lie after a step, by parameter of the first block, and copies to the device."""
    (scenario,) = (one.scenario for one in CONFIGURATIONS if one.name == name)
    observer = _Transfers()
    blocks = len(scenario.blocks)
    with started(replace(scenario, offload=None, our_options=options), "ours", observer, lambda: 0.0) as run:
        for _ in take_steps(run):
            copied, observer.seen = len(observer.seen), []
        shards = [*run.model.parameters()]
        first = shards[: len(shards) // blocks]
        return [one.device.type for one in first], [one.grad.device.type for one in first], copied


@pytest.mark.parametrize(
    "policy", [{"weights.0": CPUOffloadPolicy()}, CPUOffloadPolicy(budget=80)], ids=["by name", "by budget"]
)
def test_some_parameters_stay_on_the_device(policy: Any, on_device: Callable[..., Any]) -> None:
    """A shard of (16, 8) has the most bytes."""
    places, of_gradients, copied = on_device(homes, "plain", {"offload_policy": policy})
    assert places == of_gradients == ["cpu", "sim", "sim"]
    assert copied
