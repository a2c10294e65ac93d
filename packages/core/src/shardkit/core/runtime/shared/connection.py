"""A pair of pipes with one peer on this host: messages, in order, from a sender that never waits.

A pipe holds a limited number of bytes that its peer has not read (64 KiB with Linux's defaults), and a rank reads only
when it needs something. Messages without room are kept here, and sent whenever this rank waits for any peer.
"""

from __future__ import annotations

from collections import deque
from io import FileIO

_LENGTH = 4  # bytes in front of a message that say how many follow


class Connection:
    """The ends of this process, which do not block. `unsent` are the messages that wait for room, at least in part."""

    def __init__(self, peer: int, incoming: FileIO, outgoing: FileIO) -> None:
        self._peer = peer
        self.incoming, self.outgoing = incoming, outgoing
        self._received = b""  # of the next message, with its length
        self._rest = b""  # of the first one in `unsent`
        self.unsent: deque[bytes] = deque()

    def close(self) -> None:
        self.incoming.close()
        self.outgoing.close()

    def send(self, message: bytes) -> None:
        """Sends a message, now or when there is room. Raises ConnectionError if the peer's process has ended."""
        self.unsent.append(message)
        self.flush()

    def flush(self) -> None:
        """Sends as much of the waiting messages as there is room for. Raises as `send` does."""
        try:
            while self.unsent:
                self._rest = self._rest or len(self.unsent[0]).to_bytes(_LENGTH, "little") + self.unsent[0]
                if not (sent := self.outgoing.write(self._rest)):
                    return
                self._rest = self._rest[sent:]
                if not self._rest:
                    self.unsent.popleft()
        except ConnectionError as error:
            self.unsent.clear()
            raise _gone(self._peer) from error

    def receive(self) -> bytes | None:
        """The next message, None if there is none yet. Raises ConnectionError after the last one of an ended process.

        It leaves the messages after it in the pipe, where `select.poll` finds them.
        """
        while missing := self._missing:
            piece = self.incoming.read(missing)
            if piece is None:
                return None
            if not piece:
                raise _gone(self._peer)
            self._received += piece
        message, self._received = self._received[_LENGTH:], b""
        return message

    @property
    def _missing(self) -> int:
        """Bytes that the length, or else the message, still lacks."""
        received = len(self._received)
        if received < _LENGTH:
            return _LENGTH - received
        return _LENGTH + int.from_bytes(self._received[:_LENGTH], "little") - received


def _gone(peer: int) -> ConnectionError:
    return ConnectionError(f"the process of rank {peer} of the group has ended; read its log for the cause")
