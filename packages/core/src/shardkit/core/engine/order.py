"""The order in which the states of one root run: recorded by each forward, used by the next one and by backward.

Note [Several forwards, one backward]
A pipeline runs the forwards of several micro-batches before the first backward, which visits the passes of the first
micro-batch only. The passes of the other forwards are set aside until this backward ends. Otherwise it would enter
them, leave none of them, and so gather all groups at once. Autograd says which nodes a backward will execute. A forward
is set aside if backward leaves none of its passes, although it could be seen leaving one. A backward may also run
inside a forward, as for a force or a penalty: passes of this forward are set aside one by one.

One backward may also visit several forwards (the sum of their losses). It may enter a pass through one that lies inside
it: a model returns the output of its last block. Then the passes around are entered with it, and their own hooks, which
come later, drop no pass of another forward.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from shardkit.core.engine.param_group import FSDPParamGroup
from shardkit.core.engine.timetable import Timetable
from shardkit.core.torch_compat import current_backward, runs_in_this_backward

__all__ = ["Order", "Pass", "ScheduledState", "no_state"]

# At most this many entries of forwards without a backward are kept.
_LONGEST = 10_000


class ScheduledState(Protocol):
    """A state, one for each `fully_shard` call, as an item of an order (`state.py` documents its methods)."""

    modules: tuple[weakref.ReferenceType[nn.Module], ...]
    groups: list[FSDPParamGroup]
    index: int
    fqn: str
    is_root: bool | None
    auto_reshard: bool
    backward_prefetch: list[weakref.ReferenceType[Any]]
    runs_method: bool

    @property
    def groups_below(self) -> Iterable[FSDPParamGroup]: ...
    def end_incomplete_pass(self) -> None: ...
    def pre_backward(self) -> None: ...
    def prefetch_for_backward(self) -> Sequence[ScheduledState]: ...
    def wait_for_unshard(self) -> None: ...
    def end_backward(self) -> None: ...
    def reset(self) -> None: ...


def no_state() -> None:
    """Stands for a weak reference where a pass runs in no state's forward."""
    return


@dataclass(slots=True, eq=False)
class Pass:
    """A forward of one state, from the first of its modules to the last.

    Attributes:
        state: index of the state in the list of the order.
        began: autograd's sequence number when it began; its nodes have this number or higher ones.
        outer: returns the state that backward continues with: the one in whose forward it ran, if there is one.
        around: the same, but returns None where a recomputation begins.
        pending: ids of the modules of the state that have not run yet.
        leaving: weakly, the autograd node through which backward leaves it; None if no input needs a gradient.
        has_backward: whether backward will visit it, because an output has a place in the graph.
        forward: number of the outermost forward that it belongs to, from 1 on; 0 for a recomputation.
    """

    state: int
    began: int = 0
    outer: Callable[[], ScheduledState | None] = no_state
    around: Callable[[], ScheduledState | None] = no_state
    pending: set[int] = field(default_factory=set)
    leaving: weakref.ReferenceType[Any] | None = None
    has_backward: bool = False
    forward: int = 0

    def will_be_left(self) -> bool:
        """Whether the current backward will call us when it leaves this pass."""
        node = None if self.leaving is None else self.leaving()
        return node is not None and runs_in_this_backward(node)


class Order:
    """The recorded order, and the iteration's place in it. Weak references, see `schedule.py`, Note [Who owns whom].

    Attributes:
        forward: the order of the last complete forward of the root.
        backward: that of the running backward, or of the last one.
        in_backward: whether a backward of these states is running; forwards within it are recomputations.
        is_steady: whether the last two forwards ran in the same order.
        passes: the forwards that backward will visit, in the order in which they ended. During a backward, those that
            another backward will visit are set aside.
    """

    def __init__(self) -> None:
        self._forward_root: Callable[[], ScheduledState | None] = no_state
        self.in_backward = False
        self.is_steady = False
        self.passes: list[Pass] = []
        self._set_aside: list[Pass] = []
        self._before: list[Pass] = []  # all passes, before some were set aside
        self._backward = -1  # number of the running backward
        self._staying: set[int] = set()  # states that the running backward has entered and will not be seen leaving
        self._around: set[int] = set()  # states that it has entered through a pass inside theirs, before their own hook
        self._forwards = 0
        self._awaited = Counter[int]()  # number of passes of each state
        self._states: list[weakref.ReferenceType[ScheduledState]] = []
        self.forward = Timetable()
        self.backward = Timetable()
        self._recording: list[int] = []

    # -- states --------------------------------------------------------------------------------------------------------

    def set_states(self, states: Sequence[ScheduledState]) -> None:
        """All states below the root, root first, in the order of `named_modules`."""
        self._states = [weakref.ref(state) for state in states]
        for index, state in enumerate(states):
            state.index = index

    @property
    def states(self) -> list[ScheduledState]:
        """The states that are still alive."""
        return [state for reference in self._states if (state := reference()) is not None]

    def state_at(self, index: int) -> ScheduledState | None:
        """The state at an index, None if it has been deleted."""
        return self._states[index]()

    @property
    def groups(self) -> list[FSDPParamGroup]:
        """The groups of all states, each once."""
        return list(dict.fromkeys(group for state in self.states for group in state.groups))

    # -- recording -----------------------------------------------------------------------------------------------------

    def begin_forward(self, root: ScheduledState) -> None:
        """The outermost forward begins, which `root` runs."""
        self._forward_root = weakref.ref(root)
        self.forward.restart()
        self._recording = []
        self._forwards += 1

    def record(self, state: ScheduledState) -> bool:
        """A state's forward begins. False if the order of the last forward does not expect it."""
        if self.in_backward:
            return False
        self._recording.append(state.index)
        return self.forward.follow(state.index)

    @property
    def running_forward(self) -> ScheduledState | None:
        """The outermost state whose forward has begun and not ended, None if there is none."""
        return self._forward_root()

    def end_forward(self, *, complete: bool) -> None:
        """The forward of all states has ended; if it is `complete`, the next one follows its order."""
        self._forward_root = no_state
        if complete:
            self.is_steady = self.forward.states == tuple(self._recording)
            if not self.is_steady:
                self.forward = Timetable(self._recording)
        self._recording = []

    def add_pass(self, ended: Pass) -> None:
        """A state's forward has ended and backward will visit it, in the reverse of this order."""
        if self.in_backward and self.awaits_backward(ended.state):  # recomputed
            return
        ended.forward = 0 if self.in_backward else self._forwards
        self.passes.append(ended)
        self._awaited[ended.state] += 1
        if len(self.passes) > _LONGEST:
            self._awaited[self.passes.pop(0).state] -= 1

    def _drop_passes(self, first: int) -> None:
        """Forgets the pass at index `first`, and all later ones."""
        for one in self.passes[first:]:
            self._awaited[one.state] -= 1
        del self.passes[first:]

    def awaits_backward(self, index: int) -> bool:
        """Whether backward will visit the state at this index."""
        return self._awaited[index] > 0

    def begin_backward(self, of: Pass | None = None) -> None:
        """Sets aside the passes that this backward will not visit: Note [Several forwards, one backward].

        `of` is the pass whose output has called us, if it was one.
        """
        self.in_backward = True
        self._backward = current_backward()
        elsewhere = {one.forward for one in self.passes if one.leaving is not None and one.forward}
        if of is not None:
            elsewhere.discard(of.forward)
        for one in reversed(self.passes):
            if one.forward in elsewhere and one.will_be_left():
                elsewhere.discard(one.forward)
        aside = {id(one) for one in self.passes if one.forward in elsewhere}
        if self.running_forward is not None:
            aside |= self._before_inner_backward(of)
        if aside:
            self._before = self.passes
            self._set_aside = [one for one in self.passes if id(one) in aside]
            self._replace_passes([one for one in self.passes if id(one) not in aside])
        self.backward = Timetable([one.state for one in reversed(self.passes)])

    def _before_inner_backward(self, of: Pass | None) -> set[int]:
        """Identities of the passes of the running forward that a backward inside it will not visit.

        A pass whose leaving autograd does not know, because its inputs need no gradient, counts as the later ones do.
        """
        awaited, skipped = [], set[int]()
        for one in self.passes:
            if one.forward != self._forwards or one is of or one.will_be_left():
                continue
            awaited.append(id(one))
            if one.leaving is not None:
                skipped.update(awaited)
                awaited.clear()
        return skipped

    def enter_backward(self, state: ScheduledState) -> Pass | None:
        """A state's backward begins: drops its last pass and all later ones; returns the pass, None if unknown."""
        if state.index in self._around:
            self._around.discard(state.index)
            return None
        last = len(self.passes) - 1
        while last >= 0 and self.passes[last].state != state.index:
            last -= 1
        if last < 0:
            return None
        entered = self.passes[last]
        for one in self.passes[last:]:
            if one.began > entered.began:  # backward has skipped it
                continue
            if one is not entered and one.state not in self._staying:  # its own hook is still to come
                self._around.add(one.state)
            if self._will_be_left(one):
                self._staying.discard(one.state)
            else:
                self._staying.add(one.state)
        self._drop_passes(last)
        self.backward.move_to(len(self.backward.states) - 1 - last)  # nowhere if it has been added since
        return entered

    def _will_be_left(self, one: Pass) -> bool:
        if one.forward and current_backward() != self._backward:  # asked in the inner backward of a recomputation
            return one.leaving is not None and one.leaving() is not None
        return one.will_be_left()

    def stays_in(self, state: ScheduledState) -> bool:
        """Whether the running backward has entered `state` through a pass that it will not be seen leaving."""
        return state.index in self._staying

    def next_in_backward(self) -> ScheduledState | None:
        """The state whose pass the running backward visits next, None if there is none."""
        return self.state_at(self.passes[-1].state) if self.passes else None

    def _take_back_set_aside(self) -> None:
        if self._set_aside:
            left = {id(one) for one in (*self._set_aside, *self.passes)}
            before = [one for one in self._before if id(one) in left]
            added = left.difference(map(id, before))
            both = [*before, *(one for one in self.passes if id(one) in added)]
            self._replace_passes(sorted(both, key=operator.attrgetter("forward")) if added else both)
            self._set_aside, self._before = [], []

    def _replace_passes(self, passes: list[Pass]) -> None:
        self.passes = passes
        self._awaited = Counter(one.state for one in passes)

    def end_backward(self) -> None:
        """A backward has ended: what it did not visit waits for another one."""
        self.in_backward = False
        self._staying.clear()
        self._around.clear()
        self._take_back_set_aside()

    def forget_passes(self) -> None:
        """Forgets all passes: no backward will visit them."""
        self._set_aside = []
        self._drop_passes(0)

    def reset(self) -> None:
        """Forgets a failed iteration, but keeps the order learned from earlier ones."""
        self.end_backward()
        self.end_forward(complete=False)
        self.forget_passes()
