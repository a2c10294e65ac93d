"""How much unsharded memory the groups of one root may take, and what is freed to make room for a gather.

Note [Room]
A root has room for a number of groups (a prefetch depth) or for a number of bytes (a budget). A depth counts a state as
one group, and only those that forward frees: not the root's, and not those that are set to stay. A budget counts the
bytes of all groups, and the packed buffer of each gather under way.

When its forward or backward ends, a group is *cached*: its modules hold the sharded parameters, but its memory is there
and still valid. A group that is used again takes its memory back without a gather; backward, for example, begins
with the last group of forward. A gather that finds no room frees cached groups, the oldest first. Those that backward
has yet to use come last, and of these the oldest is the one that backward uses last. So a chain of groups takes the
smallest number of gathers that the room allows, without any knowledge of the order. On streams a gather waits for the
events that were recorded when its modules were done with the memory, and not for the current computation.

A module that begins needs its groups at once. If room is still lacking, a budget frees what is not in use (groups that
were gathered ahead, the last first), or raises. A depth lets modules that nest deeper take more. A gather ahead starts
only if there is room beside the groups in use and those gathered ahead; in backward, a budget does not free groups for
it that backward has yet to use.

At the end of forward, a depth keeps only the group that backward needs first; a budget keeps all. At the end of
backward none stays cached. A group is in use from the beginning of its module's forward, or backward, to the end, and
while the user holds it (`module.unshard()`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

from shardkit.core.engine.settings import DEFAULT_PREFETCH_DEPTH, Prefetch

Group: TypeAlias = Any
"""An `FSDPParamGroup` (group.py), which imports this file."""

_Reference: TypeAlias = weakref.ReferenceType[Any]


class Room:
    """See Note [Room]. `states_ahead` is the number of states whose gathers may start before they begin."""

    def __init__(self, prefetch: Prefetch) -> None:
        depth = DEFAULT_PREFETCH_DEPTH if prefetch.depth is None else prefetch.depth
        self.prefetch = prefetch
        self.states_ahead = depth if prefetch.budget is None else sys.maxsize
        self.by_bytes = prefetch.budget is not None
        self._limit = depth + 1 if prefetch.budget is None else prefetch.budget
        self._taken = 0
        self._groups: list[_Reference] = []
        # Groups whose memory a gather may free, oldest first: those without a later use, and those for backward.
        self._unneeded: dict[_Reference, int] = {}
        self._for_backward: dict[_Reference, int] = {}
        self._ahead: dict[_Reference, bool] = {}  # gathered ahead; True if for backward

    def admit(self, groups: Iterable[Group]) -> None:
        """Makes this the room of `groups`; none is cached."""
        for group in groups:
            self._groups.append(weakref.ref(group))
            group.taken = 0
            if group.is_unsharded:
                counts = group.counts_toward_depth and group.settings.reshard_after_forward
                group.taken = group.unsharded_bytes if self.by_bytes else int(counts)
                self._taken += group.taken
                if not group.in_use:
                    self.cache(group, for_backward=True)

    # -- what a group takes --------------------------------------------------------------------------------------------

    def take(self, group: Group, *, in_backward: bool, ahead: bool) -> bool:
        """Takes room for the gather of `group`, and frees memory for it; False if there is none for one `ahead` of use.

        Raises ValueError if a budget does not hold the group beside those in use.
        """
        if self.by_bytes:
            needs = group.bytes_when_used(in_backward=in_backward)
        else:
            needs = int(group.counts_toward_depth and group.settings.reshard_after_forward)
        if self._taken + needs > self._limit and needs:
            if ahead:
                if not self._free_for(needs, but_for_backward=in_backward and self.by_bytes):
                    return False
            elif not self._free_for(needs) and self.by_bytes:
                self._free_idle(group, needs)
        self.charge(group, needs)
        return True

    def charge(self, group: Group, taken: int) -> None:
        """The group takes so much of the room from now on."""
        self._taken += taken - group.taken
        group.taken = taken

    def make_room(self) -> None:
        """Frees cached memory before a reduction takes memory: as the next gather would, or what has no later use."""
        if not self.by_bytes:
            self._free_for(1)
            return
        while self._unneeded:
            self._free(next(iter(self._unneeded)))

    def _free_for(self, needs: int, *, but_for_backward: bool = False) -> bool:
        """Frees cached memory until there is room; whether there is."""
        while self._taken + needs > self._limit:
            queue = self._unneeded or self._for_backward
            if not queue or (queue is self._for_backward and but_for_backward):
                return False
            self._free(next(iter(queue)))
        return True

    def _free(self, reference: _Reference) -> None:
        group = reference()
        if group is None:
            for queue in (self._unneeded, self._for_backward):  # deleted, with its memory
                self._taken -= queue.pop(reference, 0)
        elif group.is_unsharded:
            group.reshard()
        else:
            group.free()

    def _free_idle(self, group: Group, needs: int) -> None:
        """Frees unsharded groups that are not in use, those that are used soonest last, until there is room."""
        groups = [one for reference in self._groups if (one := reference()) is not None]
        ahead = [one for reference in reversed(self._ahead) if (one := reference()) is not None and one.prefetched]
        for idle in (*(one for one in groups if not one.prefetched), *ahead):
            if idle.is_unsharded and not idle.in_use:
                idle.reshard()
                if self._taken + needs <= self._limit:
                    return
        beside = [one for one in groups if one.taken]
        in_use = sum(one.taken for one in beside)
        names = ", ".join(sorted(f"'{one.label}'" for one in beside))
        taken = f" beside the {in_use} bytes of groups that are in use with it ({names})" if beside else ""
        raise ValueError(
            f"the prefetch budget of {self._limit} bytes does not hold group '{group.label}', which takes {needs} "
            f"bytes unsharded{taken}. Give set_prefetch_budget at least {in_use + needs} bytes, or shard the module "
            "in smaller groups"
        )

    # -- when a group is no longer in use ------------------------------------------------------------------------------

    def cache(self, group: Group, *, for_backward: bool) -> bool:
        """A gather may free the memory of `group`, also if it is set to stay; `for_backward` if backward will use it.

        False if nothing is cached: with a depth of 0, and of groups that take no room.
        """
        if not (self.states_ahead and group.taken):
            return False
        (self._for_backward if for_backward else self._unneeded)[weakref.ref(group)] = group.taken
        return True

    def uncache(self, group: Group) -> bool:
        """No gather may free the memory of `group` any more; whether one might."""
        reference = weakref.ref(group)  # in both, if backward has used the group without unsharding it
        found = [queue.pop(reference, None) for queue in (self._unneeded, self._for_backward)]
        return found != [None, None]

    def free_cached(self, *, but_for_backward: bool = False) -> None:
        """Frees the memory of cached groups, except what is kept `but_for_backward`. Unsharded groups stay."""
        queue = [*self._for_backward]
        kept = 0 if not but_for_backward else len(queue) if self.by_bytes else 1
        for reference in (*self._unneeded, *queue[: len(queue) - kept]):
            group = reference()
            if group is None or not group.is_unsharded:
                self._free(reference)
        if not but_for_backward:  # no phase runs: forgets groups that were deleted with their memory
            alive = [group for reference in self._groups if (group := reference()) is not None]
            self._groups = [weakref.ref(group) for group in alive]
            self._taken = sum([group.taken for group in alive])

    # -- gathers ahead of use ------------------------------------------------------------------------------------------

    def gather_ahead(self, groups: Iterable[Group], *, in_backward: bool) -> bool:
        """Starts the gathers of a state that will begin soon, or keeps what it has. False if there is no room."""
        for group in groups:
            if in_backward and not group.settings.unshard_in_backward:
                continue
            if group.is_unsharded:
                stays = not group.settings.reshard_after_forward
                if not self.uncache(group) and (stays or not group.in_use):
                    continue
            elif not group.unshard(in_backward=in_backward, ahead=True):
                return False
            group.prefetched = True  # so that the end of another use does not free it
            self._ahead.pop(weakref.ref(group), None)
            self._ahead[weakref.ref(group)] = in_backward
        return True

    def free_unused(self, *, in_backward: bool) -> None:
        """At the end of a phase: frees groups that were gathered ahead for it in vain, as for skipped modules."""
        # A list, because resharding changes the dict.
        for reference in [reference for reference, backward in self._ahead.items() if backward == in_backward]:
            del self._ahead[reference]
            group = reference()
            if group is not None and group.prefetched:
                group.prefetched = False
                if not group.in_use:
                    group.reshard()

    def clear(self) -> None:
        for backward in (False, True):
            self.free_unused(in_backward=backward)
        self.free_cached()
