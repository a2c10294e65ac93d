"""A socket to one peer on this host: messages and descriptors, in order, from senders that never wait.

A socket holds a limited number of messages that its peer has not read (278 with Linux's defaults), and a rank reads
only when it needs something. Messages without room are kept here, and sent whenever this rank waits for this peer.
"""

from __future__ import annotations

import array
import errno
import os
import resource
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence

__all__ = ["MOST_DESCRIPTORS", "Connection"]

MOST_DESCRIPTORS = 250
"""How many descriptors go with one message; Linux allows 253."""


class Connection:
    """One end of a connection. `unsent` are messages that wait for room, with their descriptors."""

    def __init__(self, peer: int, ours: socket.socket, size: int, timeout: float) -> None:
        """`peer` is the rank at the other end, for error messages; `size` is the size of messages in bytes."""
        _limit_waiting(ours, timeout)
        self._peer = peer
        self._socket = ours
        self._size = size
        self._timeout = timeout
        self._space = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
        self._lost: OSError | None = None
        self._refused_since: float | None = None
        self.unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        weakref.finalize(self, _close_descriptors, self.unsent)

    def fileno(self) -> int:
        """The socket's descriptor, for `select.poll`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the socket of this process."""
        self._socket.close()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Sends a message, now or when there is room. The descriptors may be closed afterwards.

        Raises:
            ConnectionError: if the peer's process has ended.
            OSError: as `flush` does.
        """
        if self.unsent:
            self.flush()
        if self.unsent or not self._hand_over(message, fds):
            self.unsent.append((message, tuple(map(os.dup, fds))))

    def flush(self) -> None:
        """Sends as many waiting messages as there is room for.

        Raises:
            ConnectionError: if the peer's process has ended.
            OSError: if the kernel has carried no more descriptors for this user since the group's timeout.
        """
        while self.unsent and self._hand_over(*self.unsent[0]):
            _close(self.unsent.popleft()[1])

    def give_up(self) -> None:
        """Drops the waiting messages: the peer is gone."""
        _close_descriptors(self.unsent)

    def _hand_over(self, message: bytes, fds: Sequence[int]) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([message], ancillary, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise _gone(self._peer) from error
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self._note_refusal()
            return False
        self._refused_since = None
        return True

    def _note_refusal(self) -> None:
        """Descriptors that a user's processes have sent and nobody has read count against the limit on open files."""
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since > self._timeout:
            self._refused_since = None
            raise _too_many_on_their_way(self._peer)

    @property
    def awaited(self) -> int:
        """The events for `select.poll`: readable, and writable if a message waits for room."""
        return select.POLLIN | (select.POLLOUT if self.unsent and self._refused_since is None else 0)

    @property
    def refused(self) -> bool:
        """True if the kernel is out of in-flight descriptors; it does not signal when they are free again."""
        return self._refused_since is not None

    def receive(self, *, wait: bool) -> tuple[bytes, list[int]] | None:
        """The next message and its descriptors, which the caller must close; None if there is none and `wait` is False.

        Raises:
            ConnectionError: if the peer's process has ended and all its messages have been read.
            TimeoutError: if nothing arrives within the timeout.
            OSError: if a message was lost, as this process may not open its descriptors; also on all later calls.
        """
        if self._lost is not None:
            raise self._lost
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            try:
                message, ancillary, came, _ = self._socket.recvmsg(self._size, self._space, flags)
            except ConnectionResetError:  # raised once for unread data; the peer's messages remain
                message, ancillary, came, _ = self._socket.recvmsg(self._size, self._space, flags)
        except BlockingIOError:
            if not wait:
                return None
            raise self.late() from None
        except ConnectionError as error:
            raise _gone(self._peer) from error
        if not message:
            raise _gone(self._peer)
        fds = _descriptors(ancillary) if ancillary else []
        if came & socket.MSG_CTRUNC:
            _close(fds)
            self._lost = _too_many_open(self._peer)
            raise self._lost
        return message, fds

    def late(self) -> TimeoutError:
        """The error for a peer that does not respond."""
        return TimeoutError(
            f"rank {self._peer} of the group has not come within {self._timeout:.0f} s; "
            "read its log, or find where it waits with `shardkit watch`"
        )


def _gone(peer: int) -> ConnectionError:
    return ConnectionError(f"the process of rank {peer} of the group has ended; read its log for the cause")


def _too_many_open(peer: int) -> OSError:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OSError(
        errno.EMFILE,
        f"rank {peer} of the group shares memory that this process cannot open: it is at its limit of {limit} open "
        "files; raise it (ulimit -n) or set SHARDKIT_SHARED_MEMORY=0 on any rank to do without",
    )


def _too_many_on_their_way(peer: int) -> OSError:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OSError(
        errno.ETOOMANYREFS,
        f"memory for rank {peer} of the group cannot be shared: more than {limit} descriptors, which is the limit on "
        "open files, are on their way between this user's processes and are not being read; raise it (ulimit -n) or "
        "set SHARDKIT_SHARED_MEMORY=0 on any rank to do without",
    )


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _close_descriptors(unsent: deque[tuple[bytes, tuple[int, ...]]]) -> None:
    while unsent:
        _close(unsent.popleft()[1])


def _limit_waiting(connection: socket.socket, seconds: float) -> None:
    """Makes the kernel end a receive after `seconds`. Python's own timeout would cost a system call each time."""
    connection.settimeout(None)
    connection.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(round(seconds * 1e6), 10**6))
    )
