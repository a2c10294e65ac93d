"""Senders and receivers alike: a process that asks sender 0, and serves those that want buckets."""

from __future__ import annotations

import asyncio
import time
from typing import Self

from shardkit.weights.wire import RETRY, Connection, IOThread, Message, News, call, listen, parse, secret_for, serve


class Peer:
    """A process that joins sender 0, with the message `_hello`, when it has something to ask. All coroutines run in the
    loop of an `IOThread`.
    """

    _hello: Message

    def __init__(self, address: str, timeout: float) -> None:
        self._address, self._timeout = address, timeout
        self._host, self._port = parse(address)
        self._secret = secret_for(self._host)
        self._control: Connection | None = None  # to sender 0
        self._joining = asyncio.Lock()
        self._news = News()
        self._io = IOThread()

    def close(self) -> None:
        self._io.close(self._leave)  # or sender 0 would wait for a sign of life

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _join(self, within: float) -> None:
        """Tries for so many seconds, if this has not joined. Raises OSError or TimeoutError."""
        deadline = time.monotonic() + within
        async with self._joining:
            while self._control is None:
                try:
                    self._control = await self._joined()
                except (OSError, TimeoutError):
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(RETRY)

    async def _joined(self) -> Connection:
        connection = await call(self._host, self._port, self._secret)
        try:
            listener = listen(connection.hosts[0], 0)
            connection.spawn(serve(listener, self._secret, self._serve))
            host, port = listener.getsockname()[:2]
            await connection.send({**self._hello, "host": host, "port": port})
        except BaseException:
            connection.close()
            raise
        connection.spawn(connection.beat())
        return connection

    async def _ask(self, question: Message) -> Message:
        """The answer of sender 0. Raises OSError if it is gone, TimeoutError if it shows no sign of life."""
        if (control := self._control) is None:
            raise ConnectionError("the connection has ended; read its log")
        try:
            await control.send(question)
            return await control.hear(self._timeout)
        except BaseException:  # the answer to another question may come next
            self._leave()
            raise

    def _leave(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control = None

    async def _serve(self, connection: Connection) -> None:
        """Sends a receiver the buckets that it asks for, in version after version; each kind of peer has its own."""
