"""The doctor: each rule finds its problem, states the cost, and reports nothing otherwise."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.core import Owned, fully_shard
from shardkit.tools.command import main
from shardkit.tools.doctor import diagnose
from shardkit.tools.profiling import profile
from shardkit.tools.report.files import write_report
from shardkit.tools.report.measures import MEASURES
from shardkit.tools.report.merge import merge
from shardkit.tools.report.schema import ModuleOfRank, Operation, Rank, Report
from tests.support import on_ranks
from tests.tools.synthetic import MIB, memory, operation, rank, record, report

HIDDEN = {"exposed": 0.0, "blocked": 0.0, "launch": 0.0}
MISSED = [ModuleOfRank("blocks.0", ["Linear"], 0, 4, 0, 0, 0, 0)]


def found(made: Report, rule: str) -> Any:
    """The findings of one rule; there must be exactly one."""
    (one,) = [finding for finding in diagnose(made) if finding.rule == rule]
    return one


def rules(made: Report) -> set[str]:
    return {finding.rule for finding in diagnose(made)}


def operations(*changes: dict[str, Any], steps: int = 2) -> list[Operation]:
    """These operations in each step, one after the other."""
    made = []
    for step in range(steps):
        for index, change in enumerate(changes):
            start = change.get("start", 0.001 * index) + step / 10
            fields = {"number": step * len(changes) + index, "step": step, "end": start + 0.01} | change
            made.append(operation(**fields | {"start": start}))
    return made


def test_a_run_without_trouble_has_no_findings() -> None:
    made = report(*(rank(number, operations(HIDDEN, HIDDEN | {"phase": "backward"})) for number in (0, 1)))
    assert diagnose(made) == []


def of_two_ranks(capacity: int, category: str = "activations", **changes: Any) -> Report:
    """Two ranks of one host that wait, launch slowly, cut unevenly, and hold mostly one category: every trade-off.

    Each is resident with 200 MiB at most.
    """
    held = replace(memory(), peak_categories=memory().peak_categories | {category: 41 * MIB}, peak=50 * MIB)
    again = [{"phase": phase} for phase in ("forward", "backward", "backward")]
    made = [
        rank(n, operations(*again), memory=held, capacity=capacity, shard_bytes={"blocks.0": size * MIB}, **changes)
        for n, size in enumerate((6, 2))
    ]
    slow = [replace(one, steps=[replace(step, launch=0.02, optimizer=0.04) for step in one.steps]) for one in made]
    return report(*(replace(one, modules=MISSED) for one in slow))


@pytest.mark.parametrize(
    ("capacity", "first"), [(400 * MIB, "bytes"), (444 * MIB, "bytes"), (500 * MIB, "seconds"), (0, "bytes")]
)
def test_what_binds_comes_first_and_bytes_are_not_compared_with_seconds(capacity: int, first: str) -> None:
    findings = diagnose(of_two_ranks(capacity))
    units = [one.unit for one in findings]
    assert set(units) == {"bytes", "seconds"} and units[0] == first
    assert units == sorted(units, reverse=first == "seconds")
    for unit in ("bytes", "seconds"):
        shares = [one.share for one in findings if one.unit == unit]
        assert shares == sorted(shares, reverse=True)


# Each changes memory against time one way and the other.
OPPOSITES = [
    ("larger micro-batch", "smaller micro-batch"),
    ("a larger batch", "smaller micro-batch"),
    ("accumulation with set_requires_gradient_sync(False)", "reduce at each micro-batch"),
    ("set_reshard_after_forward(False)", "reshard them after forward"),
    ("set_prefetch_depth(2)", "lower set_prefetch_depth"),
    ("fewer, larger groups", "make the largest groups smaller"),
]


@pytest.mark.parametrize("category", ["activations", "gradients", "unsharded_parameters"])
@pytest.mark.parametrize("capacity", [0, 400 * MIB, 800 * MIB])
def test_memory_is_spent_or_saved_but_not_both(capacity: int, category: str) -> None:
    findings = diagnose(of_two_ranks(capacity, category))
    said = " ".join(one.change for one in findings)
    assert not [pair for pair in OPPOSITES if all(way in said for way in pair)]
    scarce = capacity < 800 * MIB
    assert any(less in said for _, less in OPPOSITES) == scarce == ("peak" in {one.rule for one in findings})
    assert any(more in said for more, _ in OPPOSITES) != scarce
    if scarce:
        (trade,) = [one for one in findings if one.rule == "peak"]
        known = "400.0 MiB of 400.0 MiB of memory are in use" if capacity else "does not say how much memory there is"
        assert known in trade.seen and "though 10.0% of a step is spent waiting" in trade.seen
    else:
        assert "(that takes memory: 400.0 MiB of 800.0 MiB of memory are in use)" in said


def test_the_share_of_a_finding_is_that_of_the_measure() -> None:
    """One step of three was slow, and waited: the mean of the waits cannot be a share of the median step."""
    slow, (first, *_) = [0.01, 0.01, 0.7], rank(0).steps
    ends = [0.1, 0.2, 1.2]
    made = rank(
        0,
        [operation(number=n, step=n, end=lost, exposed=lost, blocked=lost) for n, lost in enumerate(slow)],
        steps=[
            replace(first, index=n, begin=begin, end=end, exposed=seconds)
            for n, (begin, end, seconds) in enumerate(zip([0.0, 0.1, 0.2], ends, slow, strict=True))
        ],
    )
    one = record(made, 1)
    whole = merge([replace(one, run=replace(one.run, recorded_steps=3))])
    measure = next(one for one in MEASURES if one.name == "exposed_share")
    assert measure.of(whole) == pytest.approx(0.72 / 1.2)
    assert found(whole, "exposed").share == pytest.approx(measure.of(whole))


def test_a_rank_that_is_always_late() -> None:
    together = {"number": 1, "start": 0.05, **HIDDEN}
    on_time = operations({"end": 0.03, "exposed": 0.03, "blocked": 0.03, "start": 0.0}, together, steps=1)
    late = operations({"start": 0.02, "end": 0.03, "exposed": 0.01, "blocked": 0.01}, together, steps=1)
    one = found(report(rank(0, on_time), rank(1, late)), "late-rank")
    assert one.seen == (
        "rank 1 (host-a) came last to 1 of the 1 collectives (2 in all) that ranks began at least 100 us apart, "
        "10.0 ms after the first on average"
    )
    assert one.cost == pytest.approx(0.02 / 2)  # seconds a step, of two
    assert one.price == "10.0 ms a step, 10.0% of the step"


def test_ranks_that_are_late_in_turn() -> None:
    turns = {"number": 0, "start": 0.0}, {"number": 1, "start": 0.05}
    first = operations({**turns[0], "end": 0.03, "exposed": 0.03, "blocked": 0.03}, {**turns[1], **HIDDEN}, steps=1)
    second = operations({**turns[0], "start": 0.02, **HIDDEN}, {**turns[1], "start": 0.03, **HIDDEN}, steps=1)
    assert "ranks-in-turn" in rules(report(rank(0, first), rank(1, second)))


def test_groups_that_are_too_small() -> None:
    small = [{"fqn": f"norms.{index}", "bytes": 1024, "exposed": 0.002, "blocked": 0.002} for index in range(5)]
    one = found(report(*(rank(number, operations(*small)) for number in (0, 1))), "small-group")
    assert "5 groups hold less than 1.0 MiB each ('norms.0', 'norms.1', 'norms.2', ...)" in one.seen
    assert one.cost == pytest.approx(5 * 0.003)  # waiting and launching
    large = [change | {"bytes": 2 * MIB} for change in small]
    assert "small-group" not in rules(report(*(rank(number, operations(*large)) for number in (0, 1))))


FIVE = [{"exposed": 0.002, "blocked": 0.002}] * 5
MOSTLY_ACTIVATIONS = replace(
    memory(),
    peak=50 * MIB,
    peak_categories=memory().peak_categories | {"activations": 30 * MIB, "sharded_parameters": 10 * MIB},
)
QUIET = operations(HIDDEN)
LAUNCHING = [replace(step, launch=0.02) for step in rank(0).steps]


@pytest.mark.parametrize(
    ("rule", "ranks", "cost", "words"),
    [
        (
            "gathered-often",
            [rank(number, operations(*FIVE)) for number in (0, 1)],
            3 * 0.002,
            "'blocks.0' is gathered 5 times a step where twice would do: 12.0 MiB more to send",
        ),
        ("prefetch-miss", [rank(number, modules=MISSED) for number in (0, 1)], 0.01, "blocks.0"),
        ("exposed", [rank(0), rank(1)], 0.01, "of 1 groups is not hidden by computation, most of 'blocks.0'"),
        (
            "uneven-shards",
            [rank(n, QUIET, shard_bytes={"blocks.0": size * MIB}) for n, size in enumerate((6, 2))],
            4 * 2 * MIB,
            "",
        ),
        ("peak", [rank(0, QUIET, memory=MOSTLY_ACTIVATIONS), rank(1, QUIET)], 30 * MIB, "is mostly activations"),
        ("launch", [rank(0, QUIET, steps=LAUNCHING), rank(1, QUIET)], 0.02, ""),
    ],
)
def test_what_a_rule_finds(rule: str, ranks: list[Rank], cost: float, words: str) -> None:
    one = found(report(*ranks), rule)
    assert one.cost == pytest.approx(cost) and words in one.seen


def test_the_command_speaks_plainly_and_refuses_what_is_no_report(tmp_path, capsys) -> None:
    path = tmp_path / "report.json"
    write_report(report(), path)
    assert main(["doctor", str(path), "--json", str(tmp_path / "findings.json")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("1. ")
    assert "costs 10.0 ms a step, 10.0% of the step" in shown
    assert json.loads((tmp_path / "findings.json").read_text())[0]["rule"] in shown.replace("not hidden", "exposed")
    path.write_text("{")
    assert main(["doctor", str(path)]) == 2
    assert "report.json is not a report of `shardkit profile`, or was cut short: " in capsys.readouterr().err
    write_report(report(rank(0, [], steps=[])), path)
    assert main(["doctor", str(path)]) == 2
    assert "holds no whole step" in capsys.readouterr().err


def test_stages_of_a_pipeline_are_not_uneven() -> None:
    stages = [replace(rank(number), shard_bytes={f"stage{number}": 40 * MIB}) for number in (0, 1)]
    assert "uneven-shards" not in rules(report(*stages))


def test_an_owner_that_steps_longest_is_told_with_its_parameters() -> None:
    def owner(number: int, seconds: float, nbytes: int) -> Rank:
        one = rank(number, operations(HIDDEN), owned={"blocks.0.up": nbytes, "blocks.0.down": MIB - nbytes})
        return replace(one, steps=[replace(step, optimizer=seconds) for step in one.steps])

    one = found(report(owner(0, 0.03, MIB), owner(1, 0.01, 0)), "uneven-owners")
    assert one.cost == pytest.approx(0.01)  # the slowest takes 30 ms, all 20 ms on average
    assert "takes rank 0 30.0 ms" in one.seen and "owns 1.0 MiB ('blocks.0.up')" in one.seen
    assert "plan_owners" in one.change
    assert "uneven-owners" not in rules(report(owner(0, 0.01, MIB), owner(1, 0.01, 0)))


@on_ranks(2)
def test_a_profile_tells_owners_by_fqn(rank: int, world_size: int) -> None:
    """Rank 1 owns both matrices; biases are sharded."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model, shard_placement_fn=lambda one: Owned(rank=1) if one.ndim == 2 else None)
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(model, optimizer) as recording:
        for _ in range(2):
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if made := recording.report:
        assert [one.owned for one in made.ranks] == [
            dict.fromkeys(["0.weight", "1.weight"], size) for size in (0, 16384)
        ]
        assert all(sum(one.shard_bytes.values()) == 2 * 64 * 4 // 2 for one in made.ranks)
        assert "uneven-shards" not in rules(made)  # owners are uneven on purpose
    assert (made is not None) == (rank == 0)
