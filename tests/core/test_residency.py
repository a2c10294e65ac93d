"""The groups that a budget of bytes holds, as arithmetic: a chain of groups goes forward and then backward."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.core.engine.residency import (
    Ahead,
    LastFirst,
    Ledger,
    Uses,
    gather_ahead,
    gather_next,
    is_worth_holding,
    make_room,
    worth_holding,
)

K = TypeVar("K")

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=12)
# Held, and the packed buffer beside it while it is gathered.
USES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12)


class Use(NamedTuple):
    """The bytes of a group once it is gathered, and while it is gathered."""

    held: int
    gathering: int


def _use(held: int, packed: int = 0) -> Use:
    return Use(held, held + packed)


def _anything(group: object) -> bool:
    return True


def _order(groups: Sequence[K]) -> Callable[[], Iterator[K]]:
    return lambda: iter(groups)


def _ahead(
    budget: int,
    in_use: int,
    idle: dict[K, int],
    upcoming: Sequence[K],
    use: Callable[[K], Use],
    wanted: Callable[[K], bool],
) -> Ahead[K]:
    return gather_ahead(
        budget, in_use, idle, _order(upcoming), lambda key: use(key).held, lambda key: use(key).gathering, wanted
    )


def _held(budget: int, in_use: int, upcoming: Sequence[K], use: Callable[[K], Use]) -> list[K]:
    return worth_holding(budget, in_use, _order(upcoming), lambda key: use(key).held)


def _gathers(groups: Sequence[Use], budget: int) -> list[int]:
    """The groups in the order in which they are gathered, each finished when it is used. Checks the budget."""
    uses = [*range(len(groups)), *range(len(groups) - 1, -1, -1)]
    held: dict[int, int] = {}
    gathered: list[int] = []

    def gather(group: int) -> None:
        gathered.append(group)
        held[group] = groups[group].gathering
        assert sum(held.values()) <= budget, f"{held} is more than {budget}"

    for time, group in enumerate(uses):
        upcoming = [one for one in uses[time + 1 :] if one != group]
        needs = held.get(group, groups[group].gathering)
        for one in make_room(budget, needs, {one: n for one, n in held.items() if one != group}, _order(upcoming)):
            del held[one]
        if group not in held:
            gather(group)
        held[group] = groups[group].held
        idle = {one: n for one, n in held.items() if one != group}
        ahead = _ahead(budget, held[group], idle, upcoming, groups.__getitem__, _anything)
        for one in ahead.free:
            del held[one]
        for one in ahead.gather:
            gather(one)
        if group not in _held(budget, 0, uses[time + 1 :], groups.__getitem__):
            del held[group]
    assert not held
    return gathered


@given(USES, st.integers(0, 300))
def test_a_chain_keeps_to_the_budget(sizes: list[tuple[int, int]], extra: int) -> None:
    groups = [_use(*size) for size in sizes]
    gathered = _gathers(groups, max(group.gathering for group in groups) + extra)
    assert set(gathered) == set(range(len(groups)))
    assert len(gathered) <= 2 * len(groups)


@given(USES)
def test_room_for_everything_means_one_gather_each(sizes: list[tuple[int, int]]) -> None:
    groups = [_use(*size) for size in sizes]
    assert _gathers(groups, sum(group.gathering for group in groups)) == list(range(len(groups)))


@given(SIZES, st.integers(0, 300), st.integers(0, 300))
def test_more_room_never_means_more_gathers(sizes: list[int], less: int, more: int) -> None:
    less, more = sorted((less, more))
    groups = [_use(size) for size in sizes]
    assert len(_gathers(groups, max(sizes) + more)) <= len(_gathers(groups, max(sizes) + less))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 50))
def test_equal_groups_are_gathered_again_only_where_there_is_no_room(count: int, room: int, size: int) -> None:
    """No other choice needs fewer gathers: when forward ends, all but `room` groups must be gathered once more."""
    groups = [_use(size)] * count
    assert len(_gathers(groups, room * size + size // 2)) == count + max(0, count - room)


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 40), st.integers(0, 40))),
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=10, max_size=10),
    st.sets(st.integers(0, 9)),
)
def test_what_is_decided_fits(
    budget: int,
    in_use: int,
    held: dict[int, tuple[int, int]],
    order: list[int],
    sizes: list[tuple[int, int]],
    now: set[int],
) -> None:
    idle = {key: sum(use) for key, use in held.items()}
    uses = {key: _use(*held.get(key, sizes[key])) for key in range(10)}
    hold = _held(budget, in_use, order, uses.__getitem__)
    assert in_use + sum(uses[key].held for key in hold) <= budget or not hold
    assert hold == list(dict.fromkeys(order))[: len(hold)]

    free = make_room(budget, in_use, idle, _order(order))
    left = in_use + sum(nbytes for key, nbytes in idle.items() if key not in free)
    assert left <= budget or len(free) == len(idle)
    assert not free or left + idle[free[-1]] > budget, "freed in vain"

    ahead = _ahead(budget, in_use, idle, order, uses.__getitem__, now.__contains__)
    assert set(ahead.gather) <= (set(hold) - set(idle)) & now
    assert set(ahead.free) <= set(idle) - set(hold)
    after = in_use + sum(nbytes for key, nbytes in idle.items() if key not in ahead.free)
    after += sum(uses[key].gathering for key in ahead.gather)
    assert after <= budget or not ahead.gather
    assert not ahead.free or after + idle[ahead.free[-1]] > budget, "freed in vain"


def test_what_is_used_last_goes_first() -> None:
    idle = {"early": 4, "late": 4, "unknown": 4}
    upcoming = ["next", "early", "late"]

    def ahead(budget: int) -> Ahead[str]:
        return _ahead(budget, 4, idle, upcoming, lambda key: _use(4), _anything)

    assert ahead(20) == Ahead((), ("next",))
    assert ahead(16) == Ahead(("unknown",), ("next",))
    assert ahead(12) == Ahead(("unknown", "late"), ("next",))
    assert ahead(8) == Ahead(("unknown", "late", "early"), ("next",))
    assert ahead(7) == Ahead((), ())
    assert make_room(12, 4, idle, _order(upcoming)) == ("unknown",)
    assert make_room(4, 4, idle, _order(upcoming)) == ("unknown", "late", "early")


@given(
    st.permutations(range(8)),
    st.lists(st.tuples(st.sampled_from(["use", "skip", "gain", "lose", "free"]), st.integers(0, 7)), max_size=40),
)
def test_groups_that_are_kept_sorted_are_freed_in_the_same_order(
    order: list[int], happens: list[tuple[str, int]]
) -> None:
    """`LastFirst` frees the same groups as `make_room`, which sorts all groups each time."""
    upcoming, again = list(order), {}  # `again`: used after all of `upcoming`, the last added first
    held = dict.fromkeys(order[:4], 1)

    def place(key: int) -> tuple[int, ...]:
        if key in upcoming:
            return 2, -upcoming.index(key) + len(upcoming) - len(order)
        return (1, again[key]) if key in again else (0,)

    spare = LastFirst(held, place)
    for number, (what, key) in enumerate(happens):
        if what in ("use", "skip") and upcoming:
            key = upcoming.pop(0)
            if what == "use":
                again[key] = number
                held[key] = 1
            spare.add(key)
        elif what == "gain" and key not in held:
            held[key] = 1
            spare.add(key)
        elif what == "lose":
            held.pop(key, None)
        elif what == "free" and held:
            backward = sorted(again, key=again.__getitem__, reverse=True)
            expected = make_room(len(held) - 1, 0, held, _order([*upcoming, *backward]))
            freed = spare.take(held.__contains__)
            known = {*upcoming, *again}
            assert freed is not None
            assert (freed,) == expected or (freed not in known and expected[0] not in known)
            del held[freed]
    left = [spare.take(held.__contains__) for _ in held]
    assert None not in left


def test_what_cannot_be_started_now_is_left_for_later() -> None:
    """It is worth holding, but its packed buffer does not fit beside the held groups. Nothing is freed for it."""
    uses = {"next": _use(4, packed=4), "late": _use(4)}
    assert _held(12, 4, ["next", "late"], uses.__getitem__) == ["next", "late"]
    assert _ahead(12, 4, {"late": 4}, ["next", "late"], uses.__getitem__, _anything) == Ahead((), ())
    assert _ahead(16, 4, {"late": 4}, ["next", "late"], uses.__getitem__, _anything) == Ahead((), ("next",))


def test_nothing_is_freed_for_what_backward_will_want() -> None:
    """Forward gathers nothing for backward, so there is nothing to make room for yet."""
    order = ["next", "in backward"]
    for wanted, decided in ((order, Ahead(("unknown",), ("next", "in backward"))), (["next"], Ahead((), ("next",)))):
        assert _ahead(12, 4, {"unknown": 4}, order, lambda key: _use(4), wanted.__contains__) == decided


def test_nothing_is_asked_that_the_budget_cannot_hold() -> None:
    """The decisions fall at every module, so they must not ask all the groups of a model for their bytes."""
    read: list[int] = []
    asked: list[int] = []

    def order() -> Iterator[int]:
        for group in range(100):
            read.append(group)
            yield group

    def gathering(group: int) -> int:
        asked.append(group)
        return 4

    assert gather_ahead(12, 4, {0: 4}, order, lambda group: 4, gathering, _anything) == Ahead((), (1,))
    assert read == [0, 1, 2] and asked == [1]
    assert make_room(12, 4, {0: 4}, order) == () and read == [0, 1, 2]


# -- in a time that does not grow with the number of groups ------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(10, 20), st.integers(0, 10)), min_size=4, max_size=12),
    st.integers(30, 200),
    st.lists(
        st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["drop", "hold", "let go"])), max_size=4),
        min_size=12,
        max_size=12,
    ),
    st.integers(0, 3),
)
def test_quick_answers_are_those_of_the_definitions(
    sizes: list[tuple[int, int]], budget: int, disturbances: list[list[tuple[int, str]]], every: int
) -> None:
    """A phase that goes through its groups, and in between memory is freed, or groups are held by the user."""
    groups = [_use(*size) for size in sizes]
    count = len(groups)
    order, afterwards = range(count), [*range(count - 1, -1, -1)]
    ledger: Ledger[int] = Ledger(budget)
    uses = Uses([[group] for group in order], lambda group: groups[group].held)
    assert uses.distinct
    used: set[int] = set()
    as_expected = True
    for step in order:
        used.add(step)
        ledger.put(step, groups[step].held)
        left = [*order[step + 1 :], *afterwards]

        def upcoming(left: list[int] = left) -> list[int]:
            return [group for group in left if group not in used]

        idle = {group: nbytes for group, nbytes in ledger.held.items() if group not in used}
        in_use = sum(nbytes for group, nbytes in ledger.held.items() if group in used)
        wanted = set(order[step + 1 :]).__contains__
        expected = _ahead(budget, in_use, idle, upcoming(), groups.__getitem__, wanted)
        seen = gather_next(ledger, used, uses, step + 1, lambda group: groups[group].gathering)
        if seen is not None and as_expected:  # if None, something may have to be freed
            assert (expected.free, list(expected.gather)) == ((), seen)
        for group in expected.free:
            ledger.drop(group)
        for group in expected.gather:
            ledger.put(group, groups[group].gathering if every else groups[group].held)
        for group in [*ledger.held][: every * 2]:
            ledger.put(group, groups[group].held)  # its gather has been waited for
        used.discard(step)
        in_use = sum(nbytes for group, nbytes in ledger.held.items() if group in used)
        hold = _held(budget, in_use, upcoming(), groups.__getitem__)
        for group in order:
            quick = is_worth_holding(ledger, used, uses, step + 1, afterwards, lambda group: groups[group].held, group)
            assert quick == (group in hold), group
        if step in hold:
            uses.kept.add(step)
        else:
            ledger.drop(step)
        # A group may not be worth keeping any more if another is in use that the order did not name.
        as_expected = as_expected and not any(what == "hold" for _, what in disturbances[step])
        as_expected = as_expected or not uses.kept
        for number, what in disturbances[step]:
            group = number % count
            if what == "drop":
                ledger.drop(group)
                used.discard(group)
            elif what == "hold":
                used.add(group)
                ledger.put(group, groups[group].held)
            else:
                used.discard(group)
        assert ledger.total == sum(ledger.held.values())


def test_a_module_that_begins_asks_about_one_group_and_not_about_all() -> None:
    """With room for 50 of 100 groups, a module that begins or ends asks for the bytes of the next group alone."""
    asked: list[int] = []

    def held(group: int) -> int:
        asked.append(group)
        return 4

    ledger: Ledger[int] = Ledger(200)
    uses = Uses([[group] for group in range(100)], held)
    asked.clear()
    for step in range(100):
        ledger.put(step, 4)
        for group in gather_next(ledger, {step}, uses, step + 1, held) or ():
            ledger.put(group, 4)
        assert uses.reached == min(100, step + 50)
        kept = is_worth_holding(ledger, set(), uses, step + 1, range(step, -1, -1), held, step)
        assert kept == (step >= 50)
        if not kept:
            ledger.drop(step)
    assert len(asked) <= 2 * 100, "not all groups ahead, at every module"
