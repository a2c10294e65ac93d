"""The other ranks of a process group, when all of them are on this host: a socket to each, and what was said on it.

Messages of one pair arrive in order, and a socket says at once when the process at its other end is gone.

    POST      this rank's part of an operation is ready to be read (with the table's descriptors, the first time)
    RELEASE   this rank has read the peer's part of an operation
    DROP      a table is no longer used

Operations are numbered in the order in which they are launched, gathers and reductions apart, which is the same on all
ranks, as it is for collectives.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import secrets
import socket
import struct
import weakref
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from shardkit.core.runtime.shared import segment
from shardkit.core.runtime.shared.tables import PeerTable, Table
from shardkit.core.torch_compat import timeout_of

__all__ = ["Channel", "Neighbours", "Operation", "neighbours_of", "possible"]

_RECORD = 128  # bytes of what the ranks tell each other before they meet
_MESSAGE = struct.Struct("<BBxxxxxxqq")
_MOST_DESCRIPTORS = 250  # Linux allows 253 in a message


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


class Neighbours:
    """Connections to the other ranks; `None` stands for this rank. Not for several threads."""

    def __init__(self, sockets: list[socket.socket | None], timeout: float) -> None:
        self.peers = tuple(peer for peer, one in enumerate(sockets) if one is not None)
        self._sockets = sockets
        self._timeout = timeout
        for one in sockets:
            if one is not None:
                _limit_waiting(one, timeout)
        self._next = dict.fromkeys(Channel, 0)
        self._tables: list[dict[int, PeerTable]] = [{} for _ in sockets]
        self._mapped: list[weakref.WeakValueDictionary[int, segment.Mapping]]
        self._mapped = [weakref.WeakValueDictionary() for _ in sockets]
        self._posted: list[dict[Operation, PeerTable]] = [{} for _ in sockets]
        self._unwanted: list[set[Operation]] = [set() for _ in sockets]
        self._unreleased: dict[Operation, set[int]] = {}
        _everyone.add(self)
        self._sent: set[int] = set()
        self._dropped: list[int] = []

    # -- this rank's part ----------------------------------------------------------------------------------------------

    def post(self, channel: Channel, table: Table) -> Operation:
        """Tells the peers that what `table` lists may be read; returns the operation's number. Never waits for them."""
        operation = (int(channel), self._next[channel])
        self._next[channel] += 1
        self._tell_dropped()
        fds: list[int] = []
        if table.number not in self._sent:
            fds = [table.describe(), *(one.fd for one in table.segments)]
            assert len(fds) <= _MOST_DESCRIPTORS, table.label
            weakref.finalize(table, self._dropped.append, table.number)
            self._sent.add(table.number)
        try:
            for peer in self.peers:
                self._send(peer, _Kind.POST, operation, table.number, fds)
        finally:
            for fd in fds[:1]:
                os.close(fd)
        self._unreleased[operation] = set(self.peers)
        return operation

    def release(self, operation: Operation) -> None:
        """Tells the peers that this rank has read their parts."""
        for peer in self.peers:
            if self._posted[peer].pop(operation, None) is None:
                self._unwanted[peer].add(operation)  # given up before the peer came
            with contextlib.suppress(OSError):  # a peer that is gone needs no permission
                self._send(peer, _Kind.RELEASE, operation, 0, [])

    def _tell_dropped(self) -> None:
        while self._dropped:
            number = self._dropped.pop()
            self._sent.discard(number)
            for peer in self.peers:
                self._send(peer, _Kind.DROP, (0, 0), number, [])

    def _send(self, peer: int, kind: _Kind, operation: Operation, number: int, fds: list[int]) -> None:
        connection = self._sockets[peer]
        assert connection is not None
        message = _MESSAGE.pack(kind, operation[0], operation[1], number)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            connection.sendmsg([message], ancillary)
        except ConnectionError as error:
            raise _gone(peer) from error

    def close(self) -> None:
        """Closes all connections of this process."""
        for connection in self._sockets:
            if connection is not None:
                connection.close()

    # -- the peers' parts ----------------------------------------------------------------------------------------------

    def collect(self, operation: Operation, label: str) -> list[PeerTable | None]:
        """Waits until every peer has posted `operation`; returns their tables by rank.

        Raises:
            ConnectionError: if a peer's process has ended.
            TimeoutError: after the group's timeout.
            RuntimeError: if a peer is at another group.
        """
        tables: list[PeerTable | None] = [None] * len(self._sockets)
        for peer in self.peers:
            while operation not in self._posted[peer]:
                self._receive(peer)
            table = tables[peer] = self._posted[peer][operation]
            if table.label != label:
                raise RuntimeError(
                    f"rank {peer} of the group is at '{table.label}' where this rank is at '{label}'; all ranks must "
                    "run the same modules in the same order (SHARDKIT_DEBUG=order finds the first difference)"
                )
        return tables

    def wait_released(self, operation: Operation) -> None:
        """Waits until every peer has read this rank's part of `operation`. Raises as `collect` does."""
        while waiting := self._unreleased.get(operation):
            self._receive(min(waiting))

    def is_released(self, operation: Operation) -> bool:
        """Whether every peer is known to have read this rank's part; hears what they have said, without waiting."""
        for peer in tuple(self._unreleased.get(operation, ())):
            with contextlib.suppress(BlockingIOError):
                while operation in self._unreleased:
                    self._receive(peer, socket.MSG_DONTWAIT)
        return operation not in self._unreleased

    def _receive(self, peer: int, flags: int = 0) -> None:
        connection = self._sockets[peer]
        assert connection is not None
        space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)
        try:
            try:
                message, ancillary, came, _ = connection.recvmsg(_MESSAGE.size, space, flags)
            except ConnectionResetError:  # said once when a peer has left with something unread; what it sent is there
                message, ancillary, came, _ = connection.recvmsg(_MESSAGE.size, space, flags)
        except BlockingIOError:
            if flags:
                raise
            raise TimeoutError(f"rank {peer} of the group has not come within {self._timeout:.0f} s") from None
        except ConnectionError as error:
            raise _gone(peer) from error
        if not message:
            raise _gone(peer)
        if came & socket.MSG_CTRUNC:
            raise _too_many_open(peer)
        kind, channel, sequence, number = _MESSAGE.unpack(message)
        operation = (channel, sequence)
        if kind == _Kind.POST:
            if fds := _descriptors(ancillary):
                self._adopt(peer, number, fds)
            if operation in self._unwanted[peer]:
                self._unwanted[peer].remove(operation)
            else:
                self._posted[peer][operation] = self._tables[peer][number]
        elif kind == _Kind.DROP:
            self._tables[peer].pop(number, None)
        elif waiting := self._unreleased.get(operation):
            waiting.discard(peer)
            if not waiting:
                del self._unreleased[operation]

    def _adopt(self, peer: int, number: int, fds: list[int]) -> None:
        try:
            self._tables[peer][number] = PeerTable(fds, self._mapped[peer])
        finally:
            for fd in fds:
                os.close(fd)


def _gone(peer: int) -> ConnectionError:
    return ConnectionError(f"the process of rank {peer} of the group has ended")


def _too_many_open(peer: int) -> OSError:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OSError(
        errno.EMFILE,
        f"rank {peer} of the group shares memory that this process cannot open: it is at its limit of {limit} open "
        "files; raise it (ulimit -n) or set SHARDKIT_SHARED_MEMORY=0 on any rank to do without",
    )


def _close_all() -> None:
    """In a child that was forked (a worker of a DataLoader): a rank's sockets are to close when the rank ends."""
    for neighbours in _everyone:
        neighbours.close()


_everyone: weakref.WeakSet[Neighbours] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_all)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


# -- meeting -----------------------------------------------------------------------------------------------------------

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, Neighbours | None] = weakref.WeakKeyDictionary()


def possible() -> bool:
    """Whether this process can share memory at all, and was not told not to (`SHARDKIT_SHARED_MEMORY=0`)."""
    return segment.available() and os.environ.get("SHARDKIT_SHARED_MEMORY", "1") != "0"


def neighbours_of(group: dist.ProcessGroup) -> Neighbours | None:
    """Connections to the other ranks of `group`, None if one of them is elsewhere or will not share memory.

    Collective over `group` the first time, a look-up afterwards; all ranks get the same answer.
    """
    if group not in _known:
        _known[group] = _meet(group)
    return _known[group]


def _meet(group: dist.ProcessGroup) -> Neighbours | None:
    rank, world = group.rank(), group.size()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) if possible() else None
        records = _exchange(group, _invite(listener, world))
        if listener is None or len({place for place, _ in records}) > 1 or not records[0][0]:
            return None
        timeout = timeout_of(group, torch.device("cpu"))
        sockets: list[socket.socket | None] = [None] * world
        reached = _connect(sockets, [name for _, name in records], rank)
        # A connection succeeds before it is accepted, so all ranks know whether to go on before anyone waits.
        if not all(flag == b"yes" for flag, _ in _exchange(group, (b"yes" if reached else b"no", b""))):
            for one in sockets:
                if one is not None:
                    one.close()
            return None
        listener.settimeout(timeout)
        while None in (*sockets[:rank], *sockets[rank + 1 :]):
            connection, _ = listener.accept()
            if _is_ours(connection):
                sockets[int.from_bytes(connection.recv(4), "little")] = connection
            else:
                connection.close()
    return Neighbours(sockets, timeout)


def _invite(listener: socket.socket | None, world: int) -> tuple[bytes, bytes]:
    """Where this process is (empty: it will not share) and the name under which it listens.

    Sockets with such names and memory files live in the kernel: one boot, one network namespace, one user.
    """
    if listener is None:
        return b"", b""
    name = b"shardkit-" + secrets.token_hex(16).encode()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        network, users = (Path("/proc/self/ns", kind).stat().st_ino for kind in ("net", "user"))
        listener.bind(b"\0" + name)
        listener.listen(world)
    except OSError:
        return b"", b""
    return b"%s/%d/%d/%d" % (boot, network, users, os.getuid()), name


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user: any user can see the names of such sockets."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _limit_waiting(connection: socket.socket, seconds: float) -> None:
    """Makes the kernel end a receive after `seconds`. Python's own timeout would cost a system call each time."""
    connection.settimeout(None)
    connection.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(round(seconds * 1e6), 10**6))
    )


def _exchange(group: dist.ProcessGroup, record: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Every rank's two byte strings (collective)."""
    packed = b"\0".join(record).ljust(_RECORD, b"\0")
    assert len(packed) == _RECORD
    own = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own, group=group)
    fields = [bytes(one.tolist()).split(b"\0") for one in everyone]
    return [(field[0], field[1]) for field in fields]


def _connect(sockets: list[socket.socket | None], names: list[bytes], rank: int) -> bool:
    """Connects to every rank before this one and says who is calling."""
    for peer in range(rank):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sockets[peer] = connection
        try:
            connection.connect(b"\0" + names[peer])
            connection.send(rank.to_bytes(4, "little"))
        except OSError:
            return False
    return True
