"""A training step is captured as a CUDA graph by CUDA's rules, and its replays train as eager steps do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.simulation.capture import EVERY, NOT_CAPTURED, Captures, check_capture
from tests.simulation.configurations import optimize
from tests.simulation.device import Observer
from tests.simulation.model import Block
from tests.simulation.training import Scenario, started, take_steps, whole_step

CAPTURED = [name for name in EVERY if name not in NOT_CAPTURED]

SINGLE = [name for name in EVERY if "," not in name]  # features, by day; combinations by night
TAKES_TURNS = [name for name, one in EVERY.items() if one.order is not Scenario.order]  # others each step


def captured(name: str, whole: bool = True) -> list[str]:
    """Runs in the process that has the device, as everything here that is not a test does."""
    return check_capture(EVERY[name], whole=whole)


@pytest.mark.daily(name=SINGLE)
@pytest.mark.parametrize("name", CAPTURED)
def test_a_step_is_captured(name: str, on_device: Callable[..., Any]) -> None:
    found = on_device(captured, name)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["plain", "HSDP", "unsharded after backward"])
def test_forward_and_backward_are_captured_without_the_optimizer(name: str, on_device: Callable[..., Any]) -> None:
    found = on_device(captured, name, False)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", NOT_CAPTURED)
def test_what_cannot_be_captured_is_found_out(name: str, on_device: Callable[..., Any]) -> None:
    assert any(NOT_CAPTURED[name] in finding for finding in on_device(captured, name))


class Addresses(Observer):
    """Notes for each computation of a block its name and the addresses of the parameters that it reads."""

    def __init__(self) -> None:
        self.blocks: dict[str, Any] = {}
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def computed(self, stream: int, cost: float, what: str) -> None:
        weights = list(self.blocks[what.rpartition(" ")[0]].weights)
        assert not any(isinstance(weight, DTensor) for weight in weights), what
        self.seen.append((what, tuple(weight.data_ptr() for weight in weights)))


def places(name: str) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Step by step, with an allocator that works as torch's caching one does."""
    observer, steps = Addresses(), []
    with started(replace(EVERY[name], steps=6), "ours", observer) as run:
        observer.blocks = {block.name: block for block in run.model.modules() if isinstance(block, Block)}
        run.optimizer = torch.optim.SGD([one for one in run.model.parameters() if one.requires_grad], lr=0.1)
        for _ in take_steps(run):
            if "stepped" not in run.kept:
                optimize(run)
            steps.append(observer.seen)
            observer.seen = []
    return steps


@pytest.mark.daily(name=SINGLE)
@pytest.mark.parametrize("name", [name for name in EVERY if name not in TAKES_TURNS])
def test_unsharded_parameters_lie_where_they_lay(name: str, on_device: Callable[..., Any]) -> None:
    """From the third step on, without a graph: until then the order is learnt, and storages are made."""
    *_, third, fourth, fifth, sixth = on_device(places, name)
    assert len(sixth) > 5  # five blocks in forward, and some in backward
    assert sixth == fifth == fourth == third


def gathered_before() -> str:
    captures = Captures()
    with started(EVERY["plain"], "ours", captures) as run:
        whole_step(run)
        run.model.blocks[1].unshard()
        with pytest.raises(RuntimeError) as raised, captures.capture([]):
            whole_step(run)
        captures.drop()
    return str(raised.value)


def test_what_was_gathered_before_the_capture_is_refused(on_device: Callable[..., Any]) -> None:
    """Otherwise replays would compute with the parameters of that gather."""
    assert on_device(gathered_before).startswith(
        "blocks.1: all-gather was started before the capture of the CUDA graph that uses it"
    )
