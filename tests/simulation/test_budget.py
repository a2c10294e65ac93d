"""A prefetch budget on streams: making room ahead of time costs no gather and no byte."""

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardkit.core.engine import group as group_module
from tests.simulation.model import BlockSpec
from tests.simulation.scenarios import rates
from tests.simulation.timeline import Timeline, holds_gathered
from tests.simulation.training import Run, Scenario, started, take_steps

BLOCK = BlockSpec(1.0, 2.0, ((256, 256),))
HEAD = BlockSpec(5.0, 10.0, ((5 * 256, 256),))


class _Pair(torch.nn.Module):
    """Two blocks that are recomputed together."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def both(x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))  # type: ignore[no-any-return]

        return checkpoint(both, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def _in_pairs(model: Any) -> None:
    blocks = list(model.blocks)
    model.blocks = torch.nn.ModuleList(map(_Pair, blocks[::2], blocks[1::2]))
    model.order = list(range(len(model.blocks)))


def _some_lists(model: Any) -> None:
    for begins in (0, 3):
        model.blocks[begins].set_modules_to_forward_prefetch(model.blocks[begins + 1 : begins + 3])


def _evaluate(run: Run) -> None:
    with torch.no_grad():
        run.forwards(lambda: run.model(torch.zeros(4, device="sim")))


def _head_last(step: int, count: int) -> list[int]:
    order = list(range(count - 1))
    random.Random(step).shuffle(order)
    return [*order, count - 1]


def _budget(blocks: int, also: Callable[[Any], None] = lambda model: None) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        model.set_prefetch_budget(blocks * BLOCK.numel * 4)
        also(model)

    return prepare


# Gathers of the first step, and of each later one: those that the budget does not hold from forward to backward twice.
EIGHT, SIX = (BLOCK,) * 8, (BLOCK,) * 6
CASES: dict[str, tuple[Scenario, int, int]] = {
    "recomputed in pairs, 3": (Scenario("", EIGHT, prepare=_budget(3, _in_pairs)), 13, 13),
    "recomputed in pairs, 6": (Scenario("", EIGHT, prepare=_budget(6, _in_pairs)), 10, 10),
    "lists on some blocks, 3": (Scenario("", SIX, prepare=_budget(3, _some_lists)), 9, 9),
    "lists on some blocks, 6": (Scenario("", SIX, prepare=_budget(6, _some_lists)), 6, 6),
    "a large head, 9": (Scenario("", (*SIX, HEAD), prepare=_budget(9), order=_head_last), 9, 9),
    "a large head, 11": (Scenario("", (*SIX, HEAD), prepare=_budget(11), order=_head_last), 7, 7),
    "evaluation that keeps all, 8": (
        Scenario("", EIGHT, prepare=_budget(8), step=_evaluate, options={"reshard_after_forward": False}),
        8,
        0,
    ),
}


def counted(name: str) -> tuple[list[int], int]:
    """Gathers of each step, and the most unsharded bytes. Runs in the process that has the device."""
    scenario, _, _ = CASES[name]
    timeline = Timeline(rates(block=BLOCK))
    gathers = [0]

    def gather(group: Any) -> Any:
        gathers[-1] += 1
        return _gather_sharded(group)

    with (
        started(scenario, "ours", timeline, timeline.clock) as run,
        patch.object(group_module, "gather_sharded", gather),
    ):
        for _ in take_steps(run):
            timeline.settle()
            run.model.zero_grad()
            gathers.append(0)
        return gathers[:-1], run.simulation.memory.peak(holds_gathered)


_gather_sharded = group_module.gather_sharded


@pytest.mark.parametrize("name", CASES)
def test_no_gather_and_no_byte_more(name: str, on_device: Callable[..., Any]) -> None:
    _, first, later = CASES[name]
    gathers, most = on_device(counted, name)
    assert gathers == [first, *[later] * (len(gathers) - 1)]
    assert most <= int(name.rpartition(" ")[2]) * BLOCK.numel * 4
