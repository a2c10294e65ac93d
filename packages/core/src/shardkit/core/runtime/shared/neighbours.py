"""The other ranks of a process group, if all of them are on this host, and their messages.

Messages of one pair arrive in order, and a pipe reports at once that the process at its other end is gone.

    POST      this rank's part of an operation is ready to be read (with the table, the first time)
    RELEASE   this rank has read the peer's part of an operation
    DROP      a table is no longer used

Operations are numbered in launch order, gathers and reductions separately. As for collectives, this order is the same
on all ranks.

Note [Nobody waits to be read]
A launch never waits: messages without room at a peer are kept (`connection.py`) and sent during this rank's next wait,
whatever it waits for. A rank that needs a message from one peer then listens to all, because others may also wait for
room. No wait ends before this rank's own part of the same operation has been sent: its POST with `collect`, its RELEASE
with `wait_released`. So a rank sends everything its peers are waiting for before it starts to compute or enters another
collective.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

from shardkit.core.runtime.shared.connection import Connection
from shardkit.core.runtime.shared.segment import Mapping, Segment
from shardkit.core.runtime.shared.tables import PeerTable, Table

_MESSAGE = struct.Struct("<BBxxxxxxqq")
_WHICH = 16  # bytes of a message that identify the operation; the table's number follows

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Channel(IntEnum):
    """Operations of one channel are launched in the same order on all ranks."""

    GATHER = 0
    REDUCE = 1


Operation: TypeAlias = tuple[int, int]
"""A channel and a number in it."""


class _Kind(IntEnum):
    POST = 0
    RELEASE = 1
    DROP = 2


def _undisturbed(
    method: Callable[Concatenate[Neighbours, _P], _R],
) -> Callable[Concatenate[Neighbours, _P], _R]:
    """Defers the removal of tables while active, because the garbage collector may run anywhere."""

    @functools.wraps(method)
    def run(self: Neighbours, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        outer, self._busy = self._busy, True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._busy = outer

    return run


class Neighbours:
    """Connections to the other ranks; `None` stands for this rank. Not thread-safe."""

    def __init__(self, connections: Sequence[Connection | None], timeout: float) -> None:
        self._connections = {peer: one for peer, one in enumerate(connections) if one is not None}
        self.peers = tuple(self._connections)
        self._timeout = timeout  # seconds
        self._size = len(connections)
        self._next = dict.fromkeys(Channel, 0)
        self._tables: list[dict[int, PeerTable]] = [{} for _ in connections]
        self._mapped: list[weakref.WeakValueDictionary[int, Mapping]]
        self._mapped = [weakref.WeakValueDictionary() for _ in connections]
        self._posted: list[dict[Operation, PeerTable]] = [{} for _ in connections]
        self._unwanted: list[set[Operation]] = [set() for _ in connections]
        self._unreleased: dict[Operation, set[int]] = {}
        self._read: dict[Operation, list[Segment]] = {}  # what the peers of an unreleased operation read
        self._ended: set[int] = set()  # peers found to be gone while waiting for another one
        self._known: set[int] = set()  # tables that the peers have
        self._dropped: list[int] = []
        self._busy = False
        self._closed = False
        self._thread = threading.get_ident()
        _everyone.add(self)

    def close(self) -> None:
        """Closes all connections of this process."""
        self._closed = True
        for connection in self._connections.values():
            connection.close()

    # -- this rank's part ----------------------------------------------------------------------------------------------

    @_undisturbed
    def post(self, channel: Channel, table: Table) -> Operation:
        """Tells the peers that they may read the tensors in `table`; returns the operation's number. Never waits."""
        operation = (int(channel), self._next[channel])
        self._next[channel] += 1
        self._thread = threading.get_ident()
        if self._dropped:
            self._tell_dropped()
        self._unreleased[operation], self._read[operation] = set(self.peers), table.segments
        described = b""
        if table.number not in self._known:
            self._known.add(table.number)
            described = table.describe()
            weakref.finalize(table, self._drop, table.number).atexit = False
        for peer in self.peers:
            self._send(peer, _Kind.POST, operation, table.number, described)
        return operation

    @_undisturbed
    def release(self, operation: Operation) -> None:
        """Tells the peers that this rank has read their parts. Never waits for them."""
        for peer in self.peers:
            if self._posted[peer].pop(operation, None) is None:
                self._unwanted[peer].add(operation)  # abandoned before the peer came
            with contextlib.suppress(OSError):  # a peer that is gone needs no permission
                self._send(peer, _Kind.RELEASE, operation, 0)

    def _drop(self, number: int) -> None:
        """Notes that a table of this rank is gone. May run at any point of any thread, so it may be deferred."""
        if self._closed:
            return
        self._dropped.append(number)
        if not self._busy and self._thread == threading.get_ident():
            self._tell_dropped()

    @_undisturbed
    def _tell_dropped(self) -> None:
        """Lets the peers forget such tables. If all have read one, its memory is freed at once."""
        for peer in self.peers:
            with contextlib.suppress(OSError):  # the next wait for this peer reports it
                while self._hear(peer):
                    pass
        while self._dropped:
            number = self._dropped.pop()
            self._known.discard(number)
            for peer in self.peers:
                with contextlib.suppress(OSError):
                    self._send(peer, _Kind.DROP, (0, 0), number)

    def _send(self, peer: int, kind: _Kind, operation: Operation, number: int, described: bytes = b"") -> None:
        self._connections[peer].send(_MESSAGE.pack(kind, operation[0], operation[1], number) + described)

    # -- the peers' parts ----------------------------------------------------------------------------------------------

    @_undisturbed
    def collect(
        self, operation: Operation, label: str, gradients: dict[int, str] | None = None
    ) -> list[PeerTable | None]:
        """Waits until every peer has posted `operation`; returns their tables by rank.

        `label` and `gradients` are those of the table that this rank posted.

        Raises:
            ConnectionError: if a peer's process has ended.
            TimeoutError: after the group's timeout.
            RuntimeError: if a peer runs another group, or has gradients of other parameters.
        """
        deadline = time.monotonic() + self._timeout
        self._wait_until_sent(_Kind.POST, operation, deadline)
        tables: list[PeerTable | None] = [None] * self._size
        for peer in self.peers:
            while operation not in self._posted[peer]:
                self._listen(peer, deadline)
            table = tables[peer] = self._posted[peer][operation]
            if table.label != label:
                raise RuntimeError(
                    f"rank {peer} of the group is at '{table.label}' where this rank is at '{label}'; all ranks must "
                    "run the same modules in the same order (SHARDKIT_DEBUG=order finds the first difference)"
                )
            if table.gradients.keys() != (gradients or {}).keys():
                raise RuntimeError(_other_gradients(peer, table.gradients, gradients or {}))
        return tables

    @_undisturbed
    def wait_released(self, operation: Operation) -> None:
        """Waits until every peer has read this rank's part of `operation`. Raises as `collect` does."""
        deadline = time.monotonic() + self._timeout
        while waiting := self._unreleased.get(operation):
            self._listen(min(waiting), deadline)
        self._wait_until_sent(_Kind.RELEASE, operation, deadline)

    @_undisturbed
    def is_released(self, operation: Operation) -> bool:
        """Whether every peer has read this rank's part; processes received messages without waiting."""
        for peer in tuple(self._unreleased.get(operation, ())):
            while operation in self._unreleased and self._hear(peer):
                pass
        return operation not in self._unreleased

    # -- listening -----------------------------------------------------------------------------------------------------

    def _wait_until_sent(self, kind: _Kind, operation: Operation, deadline: float) -> None:
        which = _MESSAGE.pack(kind, operation[0], operation[1], 0)[:_WHICH]
        for peer in self.peers:
            while any(message.startswith(which) for message in self._connections[peer].unsent):
                self._listen(peer, deadline)

    def _listen(self, needed: int, deadline: float) -> None:
        """Waits until something happens: takes a message from each peer that sent any, and sends waiting messages.

        Other peers that are gone are left to the wait that needs them.

        Raises:
            ConnectionError: if the peer that is needed has ended.
            TimeoutError: if nothing happens before `deadline`, a time of `time.monotonic`; names that peer. Messages of
                others do not move it: ranks that give up one after the other would each wait for another timeout.
        """
        poller, listening = select.poll(), dict[int, int]()
        for peer, connection in self._connections.items():
            if peer == needed or peer not in self._ended:
                listening |= dict.fromkeys((connection.incoming.fileno(), connection.outgoing.fileno()), peer)
                poller.register(connection.incoming, select.POLLIN)
                if connection.unsent:
                    poller.register(connection.outgoing, select.POLLOUT)
        ready = poller.poll(min(max(0, deadline - time.monotonic()) * 1000, 2**31 - 1))
        if not ready:
            raise TimeoutError(
                f"rank {needed} of the group has not come within {self._timeout:.0f} s; "
                "read its log, or find where it waits with `shardkit watch`"
            )
        for peer in {listening[fd] for fd, _ in ready}:
            try:
                self._hear(peer)
                self._connections[peer].flush()
            except ConnectionError:
                if peer == needed:
                    raise
                self._ended.add(peer)
                self._connections[peer].unsent.clear()

    def _hear(self, peer: int) -> bool:
        """Takes the next message of `peer`; returns whether there was one."""
        message = self._connections[peer].receive()
        if message is None:
            return False
        kind, channel, sequence, number = _MESSAGE.unpack_from(message)
        operation = (channel, sequence)
        if kind == _Kind.POST:
            if described := message[_MESSAGE.size :]:
                self._tables[peer][number] = PeerTable(described, self._mapped[peer])
            if operation in self._unwanted[peer]:
                self._unwanted[peer].remove(operation)
            else:
                self._posted[peer][operation] = self._tables[peer][number]
        elif kind == _Kind.DROP:
            self._tables[peer].pop(number, None)
        elif waiting := self._unreleased.get(operation):
            waiting.discard(peer)
            if not waiting:
                del self._unreleased[operation], self._read[operation]
        return True


def _other_gradients(peer: int, theirs: dict[int, str], own: dict[int, str]) -> str:
    differing = sorted(theirs.keys() ^ own.keys())
    whose = "this rank", f"rank {peer} of the group"
    has, lacks = whose if differing[0] in own else reversed(whose)
    return (
        f"{has} has a gradient of parameter '{own.get(differing[0]) or theirs[differing[0]]}' and {lacks} has none "
        f"(parameters that differ: {len(differing)}). Call set_reduce_scatter_unused_params(True) on the module, which "
        "reduces zeros where a rank has no gradient, or let all ranks use and freeze the same parameters"
    )


def _close_all() -> None:
    """In a forked child (a worker of a DataLoader): closes a rank's pipes, which must close when the rank ends."""
    for neighbours in _everyone:
        neighbours.close()


_everyone: weakref.WeakSet[Neighbours] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_all)
