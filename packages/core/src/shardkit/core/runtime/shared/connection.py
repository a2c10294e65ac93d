"""A socket to one peer on this host: messages, in order, from a sender that never waits.

A socket holds a limited number of bytes that its peer has not read (278 short messages with Linux's defaults), and a
rank reads only when it needs something. Messages without room are kept here, and sent whenever this rank waits for this
peer. Long ones go in pieces.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque

__all__ = ["Connection"]

_PIECE = 1 << 15  # bytes of a message that go at once, after a byte that says whether they are the last ones


class Connection:
    """One end of a connection. `unsent` are the pieces that wait for room, each with its message."""

    def __init__(self, peer: int, ours: socket.socket, timeout: float) -> None:
        """`peer` is the rank at the other end, for error messages."""
        _limit_waiting(ours, timeout)
        self._peer = peer
        self._socket = ours
        self._timeout = timeout
        self._received: list[bytes] = []  # pieces of the next message
        self.unsent: deque[tuple[bytes, bytes]] = deque()

    def fileno(self) -> int:
        """The socket's descriptor, for `select.poll`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the socket of this process."""
        self._socket.close()

    def send(self, message: bytes) -> None:
        """Sends a message, now or when there is room.

        Raises:
            ConnectionError: if the peer's process has ended.
        """
        for at in range(0, len(message), _PIECE):
            is_last = at + _PIECE >= len(message)
            self.unsent.append((message, bytes([is_last]) + message[at : at + _PIECE]))
        self.flush()

    def flush(self) -> None:
        """Sends as much of the waiting messages as there is room for. Raises as `send` does."""
        try:
            while self.unsent:
                self._socket.send(self.unsent[0][1], socket.MSG_DONTWAIT)
                self.unsent.popleft()
        except BlockingIOError:
            return
        except ConnectionError as error:
            self.unsent.clear()
            raise _gone(self._peer) from error

    @property
    def awaited(self) -> int:
        """The events for `select.poll`: readable, and writable if a message waits for room."""
        return select.POLLIN | (select.POLLOUT if self.unsent else 0)

    def receive(self, *, wait: bool) -> bytes | None:
        """The next message; None if there is none yet and `wait` is False.

        Raises:
            ConnectionError: if the peer's process has ended and all its messages have been read.
            TimeoutError: if nothing arrives within the timeout.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        while True:
            try:
                try:
                    piece = self._socket.recv(1 + _PIECE, flags)
                except ConnectionResetError:  # raised once for unread data; the peer's messages remain
                    piece = self._socket.recv(1 + _PIECE, flags)
            except BlockingIOError:
                if not wait:
                    return None
                raise self.late() from None
            except ConnectionError as error:
                raise _gone(self._peer) from error
            if not piece:
                raise _gone(self._peer)
            self._received.append(piece[1:])
            if piece[0]:
                message = b"".join(self._received)
                self._received.clear()
                return message

    def late(self) -> TimeoutError:
        """The error for a peer that does not respond."""
        return TimeoutError(
            f"rank {self._peer} of the group has not come within {self._timeout:.0f} s; "
            "read its log, or find where it waits with `shardkit watch`"
        )


def _gone(peer: int) -> ConnectionError:
    return ConnectionError(f"the process of rank {peer} of the group has ended; read its log for the cause")


def _limit_waiting(connection: socket.socket, seconds: float) -> None:
    """Makes the kernel end a receive after `seconds`. Python's own timeout would cost a system call each time."""
    connection.settimeout(None)
    connection.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(round(seconds * 1e6), 10**6))
    )
