"""Which states a phase gathers ahead, by the order of the last one and the number of states ahead."""

from shardkit.core.engine.timetable import Prefetch, Timetable


def _due(timetable: Timetable, ahead: int, room: int = 100) -> list[int]:
    """The states that are gathered where there is room for so many."""
    gathered: list[int] = []
    for state in timetable.due(ahead):
        if len(gathered) == room:
            break
        gathered.append(state)
    return gathered


def test_each_state_is_due_once() -> None:
    timetable = Timetable([0, 1, 2, 3, 4])
    seen = [(timetable.follow(state), _due(timetable, 2)) for state in range(5)]
    assert seen == [(True, [1, 2]), (True, [3]), (True, [4]), (True, []), (True, [])]


def test_what_found_no_room_comes_first_the_next_time() -> None:
    timetable = Timetable([0, 1, 2, 3])
    timetable.follow(0)
    assert _due(timetable, Prefetch(budget=1).states_ahead, room=1) == [1]
    timetable.follow(1)
    assert _due(timetable, Prefetch(budget=1).states_ahead) == [2, 3]


def test_a_state_that_comes_out_of_turn() -> None:
    timetable = Timetable([0, 1, 2, 0, 3])
    timetable.follow(0)
    assert not timetable.follow(4)  # unknown
    assert _due(timetable, 1) == [1]
    assert timetable.follow(0) and _due(timetable, 1) == [3]  # 1 and 2 were skipped
    assert not timetable.follow(1)
    timetable.move_to(0)  # backward has been there
    assert _due(timetable, 2) == []


def test_a_depth_of_one_is_the_default() -> None:
    assert [one.states_ahead for one in (Prefetch(), Prefetch(0), Prefetch(3))] == [1, 0, 3]
