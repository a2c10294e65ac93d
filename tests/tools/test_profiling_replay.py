"""The replay of logs made by hand."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardkit.core.events import (
    BackwardEnded,
    GatherFinished,
    GatherStarted,
    Launched,
    ModuleBegan,
    ModuleEnded,
    StorageAllocated,
    StorageFreed,
    WaitFinished,
    WaitStarted,
)
from shardkit.tools.profiling.log import (
    Entry,
    GradientsKept,
    Held,
    OptimizerBegan,
    OptimizerEnded,
    Whereabouts,
    carried,
    last_complete,
)
from shardkit.tools.profiling.memory import Memory
from shardkit.tools.profiling.replay import Replay
from shardkit.tools.report.schema import Group

ROOT = (ModuleBegan("Net", "forward", True), ModuleEnded("Net", "forward", True))
OPTIMIZER = (OptimizerBegan(), OptimizerEnded())
PROCESS_GROUP = cast(dist.ProcessGroup, object())


def walk(entries: list[Entry], trains: bool = True) -> list[tuple[int, str, str]]:
    where = Whereabouts(trains)
    places = []
    for entry in entries:
        where.follow(entry)
        places.append((where.step, where.phase, where.module))
    return places


def test_a_step_begins_with_the_forward_after_an_optimizer_step() -> None:
    entries = [*ROOT, *ROOT, *OPTIMIZER, *OPTIMIZER, *ROOT]
    assert [step for step, _, _ in walk(entries)] == [0] * 8 + [1] * 2
    assert [step for step, _, _ in walk([*ROOT, *ROOT, *ROOT], trains=False)] == [0, 0, 1, 1, 2, 2]


def test_phases_and_modules_are_followed_inwards_and_out() -> None:
    entries: list[Entry] = [
        ROOT[0],
        ModuleBegan("a", "forward", False),
        ModuleEnded("a", "forward", False),
        ROOT[1],
        ModuleBegan("Net", "backward", True),
        ModuleBegan("a", "backward", False),
        ModuleBegan("a", "recompute", False),
        ModuleEnded("a", "recompute", False),
        ModuleEnded("a", "backward", False),
        ModuleEnded("Net", "backward", True),
        BackwardEnded(True),
        *OPTIMIZER,
    ]
    forward, backward = [(0, "forward", one) for one in ("Net", "a", "Net")], (0, "backward", "Net")
    inside = (0, "backward", "a")
    assert walk(entries) == [
        *forward, (0, "other", "(other)"), backward, inside, inside, inside, backward, (0, "backward", "(backward)"),
        (0, "other", "(other)"), (0, "optimizer", "(optimizer)"), (0, "other", "(other)"),
    ]  # fmt: skip


def test_a_module_that_ends_with_its_last_part_is_around_it_in_backward() -> None:
    outside_in = [("a", False), ("a.b", False)], [("a.b", False), ("a", False)], [("a.b", False), ("Net", True)]
    for order in outside_in:
        entries: list[Entry] = [ModuleBegan(fqn, "backward", root) for fqn, root in order]
        assert walk(entries)[-1] == (0, "backward", "a.b")


def test_what_follows_the_last_optimizer_step_is_no_step() -> None:
    assert last_complete([*ROOT, *OPTIMIZER, Held("optimizer", "", 4), Held("resident", "", 5), *ROOT]) == 6
    assert last_complete([*ROOT]) is None


def started(fqn: str, **more: Any) -> GatherStarted:
    return GatherStarted(fqn, (f"{fqn}.weight",), 100, 50, torch.float32, PROCESS_GROUP, **more)


def finished(fqn: str) -> GatherFinished:
    return GatherFinished(fqn, (f"{fqn}.weight",), 100, 50, torch.float32, PROCESS_GROUP, 0.5)


def replay_of(*entries: tuple[float, Entry]) -> Replay:
    return Replay(list(entries), True, {PROCESS_GROUP: Group("0", [0, 1])})


def test_a_wait_belongs_to_the_operation_that_it_is_for() -> None:
    replay = replay_of(
        (1.0, started("a", transport="c10d")),
        (1.1, Launched("a", "all-gather", 0.1)),
        (2.0, started("b", transport="c10d")),
        (2.1, Launched("b", "all-gather", 0.1)),
        (2.5, ModuleBegan("a", "forward", False)),
        (3.0, WaitStarted("a", "all-gather")),
        (3.6, finished("a")),
        (3.7, WaitFinished("a", "all-gather", 0.7, 0.5)),
        (4.0, WaitStarted("b", "release")),
        (4.5, WaitFinished("b", "release", 0.5, 0.5)),
        (5.0, finished("b")),
    )
    a, b = replay.operations
    assert (a.fqn, a.exposed, a.blocked, a.waited_by, a.launch) == ("a", 0.7, 0.5, "a", 0.1)
    assert (a.start, a.end_seen) == (1.0, True)
    assert a.end == pytest.approx(3.5), "the data came when the idle part of the wait was over"
    assert (b.exposed, b.end_seen, b.end, b.number) == (0.0, False, 5.0, 1)
    assert [(wait.operation, wait.fqn, wait.seconds, wait.begin) for wait in replay.waits] == [
        ("release", "b", 0.5, 4.0)
    ]


def test_shared_memory_moves_data_in_the_wait() -> None:
    (one,) = replay_of(
        (1.0, started("a", transport="shared")),
        (3.0, WaitStarted("a", "all-gather")),
        (3.6, finished("a")),
        (3.7, WaitFinished("a", "all-gather", 0.7, 0.5)),
    ).operations
    assert one.moving == pytest.approx(0.2)
    assert (one.end, one.end_seen) == (3.6, True)


def test_what_began_before_the_recording_is_left_out() -> None:
    replay = replay_of((1.0, finished("a")), (2.0, WaitFinished("a", "all-gather", 0.5, 0.5)))
    assert replay.operations == []


def memory_of(*entries: Entry) -> Memory:
    where = Whereabouts(True)
    memory = Memory(entries, where)
    for index, entry in enumerate(entries):
        where.follow(entry)
        memory.follow(float(index), entry)
    return memory


def test_memory_belongs_to_the_module_with_the_longest_name_that_fits() -> None:
    names = ("Net", True), ("blocks.1", False), ("blocks.10", False), ("a, b", False)
    memory = memory_of(*(ModuleBegan(name, "forward", root) for name, root in names))
    owners = {fqn: memory.owner(fqn) for fqn in ("blocks.10.w", "blocks.1.w", "b.w", "head.w", "blocks.1: tied.w")}
    assert owners == {
        "blocks.10.w": "blocks.10",
        "blocks.1.w": "blocks.1",
        "b.w": "a, b",
        "head.w": "Net",
        "blocks.1: tied.w": "blocks.1",
    }


def test_the_peak_is_the_largest_sum_and_says_where_it_was() -> None:
    result = memory_of(
        ROOT[0],
        Held("sharded_parameters", "", 10),
        StorageAllocated("w", 100, "unsharded"),
        Held("activations", 1, 7),
        StorageFreed("w", 100, "unsharded"),
        StorageAllocated("Net", 50, "outbox"),
        Held("activations", 1, 0),
    ).result()
    assert (result.peak, result.peak_time, result.peak_module, result.peak_phase) == (117, 3.0, "Net", "forward")
    assert {name: size for name, size in result.peak_categories.items() if size} == {
        "sharded_parameters": 10,
        "unsharded_parameters": 100,
        "activations": 7,
    }
    assert result.categories["communication"].values == [50]
    assert result.categories["activations"].values == [7, 0]


def test_gradients_count_from_when_backward_makes_them_until_they_are_sharded() -> None:
    values = memory_of(
        ROOT[0],
        ModuleBegan("a", "backward", False),
        Held("gradients", "a.w", 10),
        Held("gradients", "a.b", 3),
        Held("gradients", "a.b", 3),  # added to the one that is there
        Held("gradients", "head.w", 100),
        StorageAllocated("a", 13, "gradient"),
        StorageFreed("a", 13, "gradient"),
        GradientsKept(("head.w",)),
        GradientsKept(()),
    ).result()
    assert values.categories["gradients"].values == [10, 13, 113, 103, 100, 113, 100, 0]
    assert values.modules["a"].values[-1] == 0


def test_memory_from_before_the_recording_never_makes_less_than_nothing() -> None:
    result = memory_of(ROOT[0], StorageFreed("w", 100, "unsharded"), StorageAllocated("w", 30, "unsharded")).result()
    assert result.categories["unsharded_parameters"].values == [0, 30]


ENTRIES = st.lists(
    st.one_of(
        st.builds(StorageAllocated, st.sampled_from("ab"), st.integers(1, 9), st.just("unsharded")),
        st.builds(Held, st.just("activations"), st.integers(0, 3), st.integers(0, 9)),
        st.builds(Held, st.sampled_from(["optimizer", "sharded_gradients"]), st.just(""), st.integers(0, 9)),
    ),
    max_size=30,
)


@given(ENTRIES)
def test_a_log_that_is_cut_begins_where_the_other_one_ended(entries: list[Entry]) -> None:
    whole, cut = memory_of(ROOT[0], *entries), memory_of(ROOT[0], *carried(entries))

    def level(memory: Memory, category: str) -> int:
        values = memory.result().categories[category].values
        return values[-1] if values else 0

    for category in ("unsharded_parameters", "activations", "optimizer", "gradients"):
        assert level(whole, category) == level(cut, category)


def test_what_was_resident_in_the_warm_up_is_not_carried_on() -> None:
    assert carried([Held("resident", "", 9), Held("optimizer", "", 4)]) == [Held("optimizer", "", 4)]
