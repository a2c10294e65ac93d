"""The schedule on streams, in simulated time: stock's known figures, and ours beside them."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit.core as ours
from tests.simulation.scenarios import COMPARISONS, Comparison, measure, measured
from tests.simulation.timeline import Costs
from tests.simulation.training import BLOCK, SHARDS, Scenario

# Forward and backward of every step of stock's engine, as worked out by hand: 8 blocks, forward 10 and backward 20
# each, all-gather 8, reduce-scatter 8, unless the name tells otherwise.
STOCK = {
    "base": (88, 168),
    "slow links": (122, 226),
    "order changes every step": (88, 168),
    "every other step skips half: half steps": (48, 88),
    "every other step skips half: full steps": (88, 168),
    "HSDP": (84, 178),
    "HSDP, slow between hosts": (84, 200),
    "HSDP, slow between hosts, 3 buffers": (84, 200),
}

# The rows of docs/explanation/streams.md, and the scenarios that they show, each without and with copies.
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "streams.md"
ON_PAGE = {
    "as above": "base",
    "slow links (14)": "slow links",
    "the order changes every step": "order changes every step",
    "HSDP (4, all-reduce 14)": "HSDP",
    "HSDP (4, all-reduce 22)": "HSDP, slow between hosts",
    "64 small groups": "deep, small groups",
    "one huge embedding": "huge embedding",
    "`reshard_after_forward=2`": "reshard_after_forward=2",
    "gradient accumulation": "gradient accumulation",
    "`set_prefetch_budget`, 3 blocks, changing order": "prefetch budget, 3 blocks, order changes every step",
    "bf16, fp32 reduction": "bf16, fp32 reduction",
    "CPU offload (transfers 6)": "CPU offload",
    "pipeline stages, explicit unshards": "pipeline stages",
}
# Of the first forward with HSDP: ranks compare their models, which takes an all-reduce of a few bytes.
SET_UP = 0.01


@cache
def peaks(name: str, shards: int, engine: str) -> int:
    """The peak over that many ranks, in two steps. Runs in the process that has the device."""
    comparison = COMPARISONS[name]
    return measure(
        replace(comparison, scenario=replace(comparison.scenario, shards=shards, steps=2)), engine
    ).peak_bytes


@pytest.mark.parametrize("name", STOCK)
def test_stock_takes_what_it_is_known_to_take(name: str, on_device: Callable[..., Any]) -> None:
    stock = on_device(measured, name, "stock")
    forward, backward = STOCK[name]
    assert set(stock.forward) == {forward}
    assert set(stock.backward) == {backward}


def _rows_on_page() -> dict[str, list[list[str]]]:
    """The numbers in each cell of the table of scenarios, by the row's name."""
    table = PAGE.read_text().partition("| scenario |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: [cell.replace(",", "").split("+") for cell in cells] for name, *cells in rows}


def test_every_row_of_the_page_is_checked() -> None:
    assert _rows_on_page().keys() == ON_PAGE.keys()


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page has the figures of torch 2.13")
@pytest.mark.parametrize("row", ON_PAGE)
def test_the_page_shows_what_is_measured(row: str, on_device: Callable[..., Any]) -> None:
    """Times of the last step and peaks, as exactly as the page gives them."""
    scenario = ON_PAGE[row]
    plain, copies = (
        {engine: on_device(measured, name, engine) for engine in ("stock", "ours")}
        for name in (scenario, f"{scenario}, copies")
    )
    times = [[one.forward[-1], one.backward[-1]] for one in (*plain.values(), *copies.values())]
    peaks = [[one.peak_bytes / 1024] for one in plain.values()]
    shown = _rows_on_page()[row]
    assert shown == [
        [f"{value:.{len(re.sub(r'^[^.]*[.]?', '', text))}f}" for value, text in zip(values, cell, strict=True)]
        for values, cell in zip(times + peaks, shown, strict=True)
    ]


def test_bf16_gradients_that_travel_as_bf16_cost_less_between_hosts(on_device: Callable[..., Any]) -> None:
    name = "bf16, fp32 reduction, between hosts"
    cast, narrow = (on_device(measured, one, "ours") for one in (name, f"{name}, sent as bf16"))
    assert narrow.forward == cast.forward
    assert all(one < other for one, other in zip(narrow.backward, cast.backward, strict=True))


def peak_of_wide_gradients(by_parameter: bool) -> int:
    """The peak with bf16 parameters whose gradients are summed in fp32, as each parameter or the policy says."""

    def build(model: Any) -> None:
        model.to(torch.bfloat16)
        for param in model.parameters() if by_parameter else ():
            param.grad_dtype = torch.float32

    policy = {} if by_parameter else {"mp_policy": ours.MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    scenario = Scenario("wide gradients", build=build, options=policy, coalescing=False, steps=2)
    return measure(Comparison(scenario, Costs()), "ours").peak_bytes


def test_autograd_makes_no_wide_copies_of_gradients(on_device: Callable[..., Any]) -> None:
    """The reduction casts them. Sharded ones are as wide as the parameters say."""
    by_parameter, by_policy = (on_device(peak_of_wide_gradients, by) for by in (True, False))
    assert by_parameter - by_policy <= 8 * BLOCK.numel * (4 - 2) // SHARDS


@pytest.mark.daily(name=[f"{name}, copies" for name in ON_PAGE.values()])
@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("goal", ["forward", "backward"])
def test_ours_takes_no_longer_than_stock(goal: str, name: str, on_device: Callable[..., Any]) -> None:
    """This holds for every step, the first included. If copies have a cost, our time is strictly less."""
    stock, ours = (on_device(measured, name, engine) for engine in ("stock", "ours"))
    times = list(zip(getattr(ours, goal), getattr(stock, goal), strict=True))
    if name.endswith("copies"):
        assert all(our < theirs for our, theirs in times), times
    else:
        set_up = SET_UP if goal == "forward" and name.startswith("HSDP") else 0.0
        (our_first, their_first), *later = times
        assert our_first <= their_first + set_up, times
        assert all(our <= theirs for our, theirs in later), times


@pytest.mark.daily(shards=[2], name=[*ON_PAGE.values()])
@pytest.mark.parametrize("shards", [2, 4, SHARDS])
@pytest.mark.parametrize("name", [name for name in COMPARISONS if not name.endswith("copies")])
def test_ours_peaks_no_higher_than_stock(name: str, shards: int, on_device: Callable[..., Any]) -> None:
    """All device memory, to the byte. Only a budget that holds more than stock's two groups takes what it is given."""
    stock, ours = (on_device(peaks, name, shards, engine) for engine in ("stock", "ours"))
    comparison = COMPARISONS[name]
    more = 0
    if comparison.budget is not None:
        more = max(0, comparison.budget - 2 * 4 * comparison.scenario.blocks[0].numel)
        assert on_device(measured, name, "ours").peak_gathered_bytes <= comparison.budget
    assert ours <= stock + more
