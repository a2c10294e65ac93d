"""The other ranks of a process group, if all of them are on this host, and their messages.

Messages of one pair arrive in order, and a pipe reports at once that the process at its other end is gone.

    POST      this rank's part of an operation is ready to be read: the number of a table of tensors in shared memory,
              and at its first use the table itself, with the numbers of tables that are no longer used
    RELEASE   this rank has read the peer's part of an operation

A table is JSON: data from another process is never executed. Memory is named by a descriptor of its process, which
peers, of the same user, open in `/proc`.

Operations are numbered in launch order. As for collectives, this order is the same on all ranks.

Note [Nobody waits to be read]
A launch never waits: messages without room at a peer are kept (`connection.py`) and sent during this rank's next wait,
whatever it waits for. A rank that needs a message from one peer then listens to all, because others may also wait for
room. No wait ends before this rank's own part of the same operation has been sent: its POST with `wait`, its RELEASE
with `wait_until_read`. So a rank sends everything its peers are waiting for before it starts to compute or enters
another collective.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import struct
import time
import weakref
from collections.abc import MutableMapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch

from shardkit.core import events
from shardkit.core.runtime.shared.connection import Connection
from shardkit.core.runtime.shared.segment import Mapping, Segment, locate

_numbers = itertools.count(1)

Gradients: TypeAlias = Sequence[tuple[int, str]]

_MESSAGE = struct.Struct("<Bxxxxxxxqq")  # kind, operation, number of the table
_WHICH = 16  # bytes of a message that identify the operation
_POST, _RELEASE = 0, 1


class Table:
    """Tensors of this rank that its peers may read, in a fixed order.

    `label` is the parameter group's name. `gradients` are the parameters whose gradients they are, as places in the
    group with FQNs (empty for shards). The peers compare label and places with their own.
    """

    def __init__(self, label: str, tensors: Sequence[torch.Tensor], gradients: Gradients = ()) -> None:
        self.number = next(_numbers)
        self.label = label
        self.gradients = dict(gradients)
        self.is_sent = False
        self._segments: dict[int, Segment] = {}  # which it keeps alive
        self._entries = [self._entry(tensor) for tensor in tensors]

    def _entry(self, tensor: torch.Tensor) -> tuple[int, int, int, str]:
        if not tensor.numel():
            return 0, 0, 0, "uint8"
        place = locate(tensor)
        assert place is not None and tensor.is_contiguous(), self.label
        segment, offset = place
        self._segments[segment.number] = segment
        return segment.number, offset, tensor.numel(), str(tensor.dtype).removeprefix("torch.")

    def describe(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "gradients": [*self.gradients.items()],
            "segments": [(number, segment.path) for number, segment in self._segments.items()],
            "entries": self._entries,
        }


class PeerTable:
    """A peer's table as seen by this rank: `label`, `gradients`, and 1-D `tensors` over the peer's memory."""

    def __init__(self, described: dict[str, Any], mapped: MutableMapping[int, Mapping]) -> None:
        """`mapped` are the peer's segments that are already mapped, by number: one mapping serves all tables."""
        self.label: str = described["label"]
        self.gradients: dict[int, str] = dict(described["gradients"])
        self._described = described
        self._mapped = mapped
        self._memory: dict[int, Mapping] = {}  # keeps the entries of `mapped` as long as this table

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        # To be read first within an operation for which the peer keeps their memory.
        with torch.inference_mode(False):  # sums are made in them, whatever mode was active when they arrived
            for number, path in self._described["segments"]:
                self._memory[number] = self._mapped.get(number) or Mapping(path)
            self._mapped.update(self._memory)
            return [
                self._memory[segment].tensor(offset, numel, getattr(torch, name)) if numel else torch.empty(0)
                for segment, offset, numel, name in self._described["entries"]
            ]


class Posting:
    """This rank's part of one operation. `release` must follow in any case."""

    def __init__(self, neighbours: Neighbours, number: int, table: Table) -> None:
        self.number, self.table = number, table
        self.readers = set(neighbours.peers)  # those that have yet to read it
        self.peers: list[list[torch.Tensor] | None] = []  # after `wait`: each rank's tensors, None for this rank's
        self.released = False
        self._neighbours = neighbours
        self._failed = False

    def wait(self) -> None:
        """Waits until all peers have posted. Raises if one has ended, is late, or is at another group."""
        if self._failed:  # clean-up after an error waits again for everything that may be in flight
            return
        self._failed = True
        tables = self._neighbours.collect(self)
        self._failed = False
        self.peers = [None if table is None else table.tensors for table in tables]

    def release(self) -> None:
        """Tells the peers that their tensors have been read, or will not be read. Never waits for them."""
        if not self.released:
            self.released = True
            self._neighbours.release(self.number)

    def is_read(self) -> bool:
        """Whether every peer has read this rank's part; processes received messages without waiting."""
        for peer in tuple(self.readers):
            while peer in self.readers and self._neighbours.hear(peer):
                pass
        return not self.readers

    def wait_until_read(self) -> None:
        """Waits until all peers have read this rank's part."""
        label = self.table.label
        try:
            quiet = not events.hub.active or self.is_read()
            with contextlib.nullcontext() if quiet else events.waiting(label, "release"):
                self._neighbours.wait_until_read(self)
        except (ConnectionError, TimeoutError) as error:
            raise RuntimeError(f"{label}: waiting until peers have read the shards failed: {error}") from error


class Neighbours:
    """Connections to the other ranks; `None` stands for this rank. Not thread-safe."""

    def __init__(self, connections: Sequence[Connection | None], timeout: float) -> None:
        self._connections = {peer: one for peer, one in enumerate(connections) if one is not None}
        self.peers = tuple(self._connections)
        self._timeout = timeout  # seconds
        self._size = len(connections)
        self._next = 0
        self._tables: list[dict[int, PeerTable]] = [{} for _ in connections]
        self._mapped = [weakref.WeakValueDictionary[int, Mapping]() for _ in connections]
        self._posted: list[dict[int, PeerTable]] = [{} for _ in connections]
        self._unwanted: list[set[int]] = [set() for _ in connections]
        self._unread: dict[int, Posting] = {}  # keeps the memory that peers read
        self._ended: set[int] = set()  # peers found to be gone while waiting for another one
        self._dropped: list[int] = []  # tables that peers have and that are gone; the garbage collector appends to it
        _everyone.add(self)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def post(self, table: Table) -> Posting:
        """Tells the peers that they may read the tensors in `table`. Never waits."""
        posting = self._unread[self._next] = Posting(self, self._next, table)
        self._next += 1
        news = b""
        if not table.is_sent:
            table.is_sent = True
            weakref.finalize(table, self._dropped.append, table.number).atexit = False
            dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
            news = json.dumps({"dropped": dropped, "table": table.describe()}).encode()
        for peer in self.peers:
            self._connections[peer].send(_MESSAGE.pack(_POST, posting.number, table.number) + news)
        return posting

    def release(self, number: int) -> None:
        for peer in self.peers:
            if self._posted[peer].pop(number, None) is None:
                self._unwanted[peer].add(number)  # abandoned before the peer came
            with contextlib.suppress(OSError):  # a peer that is gone needs no permission
                self._connections[peer].send(_MESSAGE.pack(_RELEASE, number, 0))

    def collect(self, own: Posting) -> list[PeerTable | None]:
        """Waits until every peer has posted its part of an operation; returns their tables by rank."""
        deadline = time.monotonic() + self._timeout
        self._wait_until_sent(_POST, own.number, deadline)
        tables: list[PeerTable | None] = [None] * self._size
        mine = own.table
        for peer in self.peers:
            while own.number not in self._posted[peer]:
                self._listen(peer, deadline)
            table = tables[peer] = self._posted[peer][own.number]
            there, here = (f"the {'reduction' if at.gradients else 'gather'} of '{at.label}'" for at in (table, mine))
            if there != here:
                raise RuntimeError(
                    f"rank {peer} of the group is at {there} where this rank is at {here}; all ranks must "
                    "run the same modules in the same order (SHARDKIT_DEBUG=order finds the first difference)"
                )
            if table.gradients.keys() != mine.gradients.keys():
                raise RuntimeError(_other_gradients(peer, table.gradients, mine.gradients))
        return tables

    def wait_until_read(self, own: Posting) -> None:
        """Waits until every peer has read this rank's part of an operation."""
        deadline = time.monotonic() + self._timeout
        while own.readers:
            self._listen(min(own.readers), deadline)
        self._wait_until_sent(_RELEASE, own.number, deadline)

    def _wait_until_sent(self, kind: int, number: int, deadline: float) -> None:
        which = _MESSAGE.pack(kind, number, 0)[:_WHICH]
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
                self.hear(peer)
                self._connections[peer].flush()
            except ConnectionError:
                if peer == needed:
                    raise
                self._ended.add(peer)
                self._connections[peer].unsent.clear()

    def hear(self, peer: int) -> bool:
        """Takes the next message of `peer`; returns whether there was one."""
        message = self._connections[peer].receive()
        if message is None:
            return False
        kind, number, table = _MESSAGE.unpack_from(message)
        if kind == _RELEASE:
            if (posting := self._unread.get(number)) is not None:
                posting.readers.discard(peer)
                if not posting.readers:
                    del self._unread[number]
            return True
        if len(message) > _MESSAGE.size:
            news = json.loads(message[_MESSAGE.size :])
            for dropped in news["dropped"]:
                self._tables[peer].pop(dropped, None)
            self._tables[peer][table] = PeerTable(news["table"], self._mapped[peer])
        if number in self._unwanted[peer]:
            self._unwanted[peer].remove(number)
        else:
            self._posted[peer][number] = self._tables[peer][table]
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


_everyone: weakref.WeakSet[Neighbours] = weakref.WeakSet()
# A forked child, such as a worker of a DataLoader, closes a rank's pipes, which must close when the rank ends.
os.register_at_fork(after_in_child=lambda: [*map(Neighbours.close, _everyone)])
