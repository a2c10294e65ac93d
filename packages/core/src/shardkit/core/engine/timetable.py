"""The order in which forward uses the states of a root, and how far along it groups are gathered ahead.

Note [Prefetching]
Forward records the order in which states run, and the next one follows it: a state that begins has the gathers of the
next states started, so that they run while it computes. Backward follows the passes of this iteration's forward from
the last one on. How far ahead is a depth, a number of states, or as far as a budget of bytes has room; `room.py`
decides whether there is room for one more. A user's explicit lists take the place of the order.

A state that the order does not expect is gathered when it begins, and nothing is gathered ahead for it; the order that
this forward takes is the next one's. On streams gathers overlap with computation anyway, because the host runs ahead,
so forward follows an order only if two forwards had it in common: a wrong guess would cost link time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DEFAULT_PREFETCH_DEPTH = 1


@dataclass(frozen=True)
class Prefetch:
    """The user's setting: a depth, a budget in bytes, or neither, which means a depth of one."""

    depth: int | None = None
    budget: int | None = None


class Timetable:
    """The states that a forward is expected to use, by index, soonest first; followed by a cursor.

    It is steady if the last two forwards used them in this order.
    """

    def __init__(self, states: Sequence[int] = (), *, is_steady: bool = False) -> None:
        self.states = tuple(states)
        self.is_steady = is_steady
        self._next = 0  # place of the first state that has not begun
        self._due = 0  # place of the first state whose gather has not started

    def follow(self, state: int) -> bool:
        """A state begins: moves to its next place. False if there is none."""
        try:  # found at once if the forward goes as expected
            self._next = self.states.index(state, self._next) + 1
        except ValueError:
            return False
        self._due = max(self._due, self._next)
        return True

    def due(self, ahead: int) -> Iterator[int]:
        """The states, among the `ahead` next ones, whose gathers have not started.

        The reader stops at a state for which there is no room; it comes first the next time.
        """
        while self._due < min(len(self.states), self._next + ahead):
            yield self.states[self._due]
            self._due += 1
