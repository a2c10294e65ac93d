"""The order in which the states of one root run: recorded by each forward, used by the next one and by backward.

Note [Several forwards, one backward]
A pipeline runs the forwards of several micro-batches before the first backward, which visits the passes of the first
micro-batch only. The passes of the other forwards are set aside until this backward ends. Otherwise it would enter
them, leave none of them, and so gather all groups at once. Autograd says which nodes a backward will execute. A forward
is set aside if backward leaves none of its passes, although it could be seen leaving one. A backward may also run
inside a forward, as for a force or a penalty: passes of this forward are set aside one by one.

One backward may also visit several forwards (the sum of their losses). It may enter a pass through one that lies inside
it: a model returns the output of its last block. Then the passes around are entered with it. Each hook names its pass,
so their own hooks, which come later, drop no pass of another forward.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from shardkit.core.engine.group import FSDPParamGroup
from shardkit.core.engine.timetable import Timetable
from shardkit.core.torch_compat import current_backward, runs_in_this_backward

__all__ = ["Order", "Pass", "ScheduledState"]

# At most this many entries of forwards without a backward are kept.
_LONGEST = 10_000


class ScheduledState(Protocol):
    """A state, one for each `fully_shard` call, as an item of an order (`step.py` documents its methods)."""

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
    def pre_backward(self, gradient: None = None, *, of: Pass) -> None: ...
    def prefetch_for_backward(self) -> Sequence[ScheduledState]: ...
    def wait_for_unshard(self) -> None: ...
    def end_backward(self) -> None: ...
    def reset(self) -> None: ...


@dataclass(slots=True, eq=False)
class Pass:
    """A forward of one state, from the first of its modules to the last.

    Attributes:
        state: index of the state in the list of the order.
        began: autograd's sequence number when it began; its nodes have this number or higher ones.
        outer: the pass that backward continues with: that in which it ran, if there is one.
        around: the same, but None where a recomputation begins.
        pending: ids of the modules of the state that have not run yet.
        leaving: weakly, the autograd node through which backward leaves it; None if no input needs a gradient.
        has_backward: whether backward will visit it, because an output has a place in the graph.
        forward: number of the outermost forward that it belongs to, from 1 on; 0 for a recomputation.
        ended: its place among all passes, in the order in which they ended.
        visited: whether backward has entered it, or skipped it.
    """

    state: int
    began: int = 0
    outer: Pass | None = None
    around: Pass | None = None
    pending: set[int] = field(default_factory=set)
    leaving: weakref.ReferenceType[Any] | None = None
    has_backward: bool = False
    forward: int = 0
    ended: int = 0
    visited: bool = False

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
        self._forward_root: weakref.ReferenceType[ScheduledState] | None = None
        self.in_backward = False
        self.is_steady = False
        self.passes: list[Pass] = []
        self._set_aside: list[Pass] = []
        self._backward = -1  # number of the running backward
        self._forwards = 0
        self._ended = 0
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
        return None if self._forward_root is None else self._forward_root()

    def end_forward(self, *, complete: bool) -> None:
        """The forward of all states has ended; if it is `complete`, the next one follows its order."""
        self._forward_root = None
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
        self._ended += 1
        ended.ended = self._ended
        self.passes.append(ended)
        self._awaited[ended.state] += 1
        if len(self.passes) > _LONGEST:
            self._awaited[self.passes.pop(0).state] -= 1

    def _drop_passes(self, first: int) -> None:
        """Forgets the pass at index `first`, and all later ones."""
        for one in self.passes[first:]:
            self._awaited[one.state] -= 1
            one.visited = True
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

    def enter_backward(self, entered: Pass) -> bool:
        """Backward enters a pass: drops it and all later ones. False if it has before, or the pass is not known."""
        if entered.visited:
            return False
        last = len(self.passes) - 1
        while last >= 0 and self.passes[last] is not entered:
            last -= 1
        if last < 0:
            return False
        self._drop_passes(last)
        self.backward.move_to(len(self.backward.states) - 1 - last)  # nowhere if it has been added since
        return True

    def will_be_left(self, one: Pass) -> bool:
        """Whether the running backward will call us when it leaves this pass."""
        if one.forward and current_backward() != self._backward:  # asked in the inner backward of a recomputation
            return one.leaving is not None and one.leaving() is not None
        return one.will_be_left()

    def _take_back_set_aside(self) -> None:
        if self._set_aside:
            self._replace_passes(sorted((*self._set_aside, *self.passes), key=operator.attrgetter("forward", "ended")))
            self._set_aside = []

    def _replace_passes(self, passes: list[Pass]) -> None:
        self.passes = passes
        self._awaited = Counter(one.state for one in passes)

    def end_backward(self) -> None:
        """A backward has ended: what it did not visit waits for another one."""
        self.in_backward = False
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
