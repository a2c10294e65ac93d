"""A socket to one peer on this host: messages, in order, from a sender that never waits.

A socket holds a limited number of bytes that its peer has not read (278 short messages with Linux's defaults), and a
rank reads only when it needs something. Messages without room are kept here, and sent whenever this rank waits for any
peer. Long ones go in pieces.
"""

from __future__ import annotations

import select
import socket
from collections import deque

_PIECE = 1 << 15  # bytes of a message that go at once, after a byte that says whether they are the last ones


class Connection:
    """One end of a connection. `unsent` are the pieces that wait for room, each with its message."""

    def __init__(self, peer: int, ours: socket.socket) -> None:
        """`peer` is the rank at the other end, for error messages."""
        ours.setblocking(False)
        self._peer = peer
        self._socket = ours
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
                self._socket.send(self.unsent[0][1])
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

    def receive(self) -> bytes | None:
        """The next message; None if there is none yet.

        Raises:
            ConnectionError: if the peer's process has ended and all its messages have been read.
        """
        while True:
            try:
                try:
                    piece = self._socket.recv(1 + _PIECE)
                except ConnectionResetError:  # raised once for unread data; the peer's messages remain
                    piece = self._socket.recv(1 + _PIECE)
            except BlockingIOError:
                return None
            except ConnectionError as error:
                raise _gone(self._peer) from error
            if not piece:
                raise _gone(self._peer)
            self._received.append(piece[1:])
            if piece[0]:
                message = b"".join(self._received)
                self._received.clear()
                return message


def _gone(peer: int) -> ConnectionError:
    return ConnectionError(f"the process of rank {peer} of the group has ended; read its log for the cause")
