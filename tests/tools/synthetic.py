"""Reports made by hand, for tests without a run: two ranks, two steps, one group of two modules below a root."""

from dataclasses import replace
from typing import Any

from shardkit.tools.report.files import RankRecord
from shardkit.tools.report.merge import merge
from shardkit.tools.report.schema import (
    CATEGORIES,
    Group,
    MemoryOfRank,
    ModuleOfRank,
    Operation,
    Overhead,
    PlaceOfRank,
    Rank,
    Report,
    Run,
    Series,
    Span,
    Step,
)

STEPS = 2
MIB = 1 << 20


def operation(**changes: Any) -> Operation:
    """An all-gather of 8 MiB that took 10 ms, all of it waited for."""
    one = Operation(
        kind="all-gather",
        fqn="blocks.0",
        phase="forward",
        step=0,
        group=0,
        number=0,
        bytes=8 * MIB,
        wire_bytes=4 * MIB,
        padding_bytes=0,
        dtype="float32",
        transport="c10d",
        start=0.0,
        end=0.010,
        end_seen=True,
        exposed=0.010,
        blocked=0.010,
        moving=0.0,
        launch=0.001,
        waited_by="blocks.0",
    )
    return replace(one, **changes)


def memory() -> MemoryOfRank:
    categories = {name: Series([], []) for name in CATEGORIES}
    categories["sharded_parameters"] = Series([0.0], [40 * MIB])
    categories["communication"] = Series([0.01, 0.02], [4 * MIB, 0])
    peak = dict.fromkeys(CATEGORIES, 0) | {"sharded_parameters": 40 * MIB, "communication": 4 * MIB}
    modules = {"blocks.0": Series([0.0, 0.05], [9 * MIB, 0]), "Net": Series([0.02], [MIB])}
    resident = Series([0.0], [200 * MIB])
    return MemoryOfRank(categories, modules, resident, 44 * MIB, 0.01, "blocks.0", "forward", peak, 200 * MIB)


def rank(number: int, operations: list[Operation] | None = None, begin: float = 0.0, **changes: Any) -> Rank:
    """A rank that took two steps of 100 ms; by default it gathered `blocks.0` once in each."""
    if operations is None:
        operations = [
            operation(step=step, number=step, start=begin + step / 10, end=begin + step / 10 + 0.01)
            for step in range(STEPS)
        ]
    made = Rank(
        rank=number,
        place=PlaceOfRank("host-a", "boot-a", 100 + number),
        begin=begin,
        end=begin + 0.2,
        truncated=False,
        steps=[
            Step(step, begin + step / 10, begin + (step + 1) / 10, 0.03, 0.05, 0.01, 0.01, 0.01, 0.001)
            for step in range(STEPS)
        ],
        operations=operations,
        waits=[],
        spans=[Span("Net", "forward", step, begin + step / 10, begin + step / 10 + 0.03) for step in range(STEPS)],
        modules=[
            ModuleOfRank("Net", ["Linear"], 0, 2, 8 * MIB, 0, 0, 0),
            ModuleOfRank("blocks.0", ["Linear"], 2, 0, 8 * MIB, 0, 0, 0),
        ],
        memory=memory(),
        shard_bytes={"Net": 2 * MIB, "blocks.0": 4 * MIB},
        overhead=Overhead(0.001, 0.005, 100),
    )
    return replace(made, **changes)


def record(one: Rank, world_size: int = 2, wall: float = 0.0, groups: list[Group] | None = None) -> RankRecord:
    known = groups if groups is not None else [Group("0", list(range(world_size)))]
    run = Run(
        created="2026-01-01T00:00:00+00:00",
        command=["train.py"],
        shardkit="0.1.0",
        torch="2.13.0",
        python="3.11",
        device="cpu",
        backend="gloo",
        world_size=world_size,
        missing_ranks=[],
        recorded_steps=STEPS,
        clock="host",
        activations=True,
    )
    return RankRecord(run, wall, known, one)


def report(*ranks: Rank) -> Report:
    """Of these ranks, or of two."""
    ranks = ranks or (rank(0), rank(1))
    return merge([record(one, len(ranks)) for one in ranks])
