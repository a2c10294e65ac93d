"""The verdict: from the ranks' messages to the missing ranks, also if several are missing."""

import msgspec

from shardkit.tools.report.schema import PlaceOfRank
from shardkit.tools.watch.verdict import Kind, Process, Started, Statement, WaitingFor, verdict

GROUP = (0, 1, 2)


def started(*labels: str, count: int | None = None, group: str = "1") -> Started:
    return Started(Kind("all-gather", group, GROUP), len(labels) if count is None else count, list(labels))


def said(rank: int, waiting: WaitingFor | None, *began: Started, stack: tuple[str, ...] = ()) -> Statement:
    return Statement(rank, 4, "forward", "blocks.1", waiting, list(began), list(stack), None)


def wait(fqn: str = "blocks.1", number: int = 1, seconds: float = 7.0) -> WaitingFor:
    return WaitingFor("all-gather", fqn, Kind("all-gather", "1", GROUP), number, seconds)


HERE = started("blocks.0", "blocks.1")


def test_who_has_not_started_and_who_says_nothing_is_missing() -> None:
    text = verdict({0: said(0, wait(), HERE), 1: said(1, None, started("blocks.0"))}, {2: "process 5 has ended"})
    assert text.splitlines()[:4] == [
        "rank 0 has waited 7 s for all-gather of 'blocks.1' (forward, step 4, group [0, 1, 2])",
        "  missing: rank 1: it has not started this all-gather; it is in forward of 'blocks.1', step 4",
        "  missing: rank 2: process 5 has ended",
        "  there: rank 0",
    ]


def test_the_majority_is_where_all_should_be() -> None:
    other = said(2, wait("blocks.9", seconds=100.0), started("blocks.0", "blocks.9"))
    text = verdict({0: said(0, wait(), HERE), 1: said(1, wait(), HERE), 2: other}, {})
    assert "for all-gather of 'blocks.1'" in text.splitlines()[0]
    assert "missing: rank 2: it took another branch: its all-gather in this place was of 'blocks.9'" in text
    assert "  there: rank 0, rank 1" in text
    assert "different branches: all-gather number 1 was on rank 0 of 'blocks.1', rank 1 of 'blocks.1', rank 2" in text


def test_groups_over_the_same_ranks_are_told_apart() -> None:
    """Two models with a mesh each: one rank is late in the second model, and nobody took another branch."""
    teacher = started("teacher", "teacher", group="2")
    late = started("teacher", group="2")
    text = verdict({0: said(0, wait(), teacher, HERE), 1: said(1, None, late, started("blocks.0"))}, {})
    assert "missing: rank 1: it has not started this all-gather" in text
    assert "branch" not in text
    text = verdict({0: said(0, wait(), HERE, teacher), 1: said(1, None, late, HERE)}, {2: "process 5 has ended"})
    assert "  there: rank 0, rank 1" in text
    assert "branch" not in text


def test_set_up_is_waited_for_by_all() -> None:
    meeting = WaitingFor("set-up", "Net", Kind("set-up"), -1, 3.0)
    text = verdict({0: said(0, meeting), 1: said(1, None)}, {})
    assert "rank 0 has waited 3 s for set-up of 'Net'" in text
    assert "missing: rank 1: it is elsewhere" in text


def test_statements_travel_as_text_and_places_tell_the_condition_of_a_process() -> None:
    one = said(0, wait(), HERE, stack=("a",))
    assert msgspec.json.decode(msgspec.json.encode(one), type=Statement) == one
    here = Process.own()
    assert "is alive, but does not answer" in here.condition()
    assert "has ended" in Process(here.place, "0").condition()
    assert "cannot be reached" in Process(PlaceOfRank("elsewhere", "another boot", 1), "1").condition()
