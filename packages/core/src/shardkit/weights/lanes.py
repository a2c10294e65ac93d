"""The way from a process that has bytes to one receiver: from a sender, or from the receiver before it in a chain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from shardkit.weights.packing import bytes_of
from shardkit.weights.shared import SharedStaging
from shardkit.weights.wire import Connection, Message, call

__all__ = ["Lane"]


class Lane:
    """Buckets of sender `rank` on their way to the receiver at a place. After a problem the rest is dropped.

    Whole buckets are written into `segment`, if the receiver shares its memory. That it reads nothing for `patience`
    seconds is a problem. All methods run in the loop of an `IOThread`.
    """

    def __init__(
        self, place: Message, rank: int, segment: SharedStaging | None, secret: bytes, patience: float
    ) -> None:
        self.problem = ""
        self.nbytes = 0  # of values that went this way
        self.segment = segment
        self._place, self._rank, self._secret, self._patience = place, rank, secret, patience
        self._queue: asyncio.Queue[tuple[Message, torch.Tensor | None, Callable[[], None]] | None] = asyncio.Queue()
        self._connection: Connection | None = None
        self._ended = False

    def put(self, message: Message, data: torch.Tensor | None, then: Callable[[], None]) -> None:
        """Sends a message and bytes; calls `then` when their memory may be written again. Without bytes the receiver
        has them already.
        """
        if self._ended:
            then()
        else:
            self._queue.put_nowait((message, data, then))

    def end(self, problem: str = "") -> None:
        """Nothing more follows; with a problem, what has been put is dropped."""
        self._ended = True
        self._queue.put_nowait(None)
        if problem and not self.problem:
            self.problem = problem
            if self._connection is not None:
                self._connection.close()

    async def run(self, round_: int) -> None:
        """Sends what is put, until `end`."""
        try:
            self._connection = await call(self._place["host"], self._place["port"], self._secret)
            await self._connection.send({"rank": self._rank, "receiver": self._place["id"], "round": round_})
        except (OSError, TimeoutError) as error:
            self.problem = self.problem or f"cannot be reached: {error or 'no answer'}"
        try:
            while (item := await self._queue.get()) is not None:
                message, data, then = item
                try:
                    if self._connection is not None and not self.problem:
                        async with asyncio.timeout(self._patience):
                            await self._send(self._connection, message, data)
                except TimeoutError:
                    self.problem = f"it has read nothing for {self._patience:g} s"
                except Exception as error:  # noqa: BLE001 - told to sender 0
                    self.problem = self.problem or f"the connection was lost: {error}"
                finally:
                    then()
            if self._connection is not None and not self.problem:
                await self._read_end(self._connection)
        finally:
            if self._connection is not None:
                self._connection.close()

    async def _send(self, connection: Connection, message: Message, data: torch.Tensor | None) -> None:
        self.nbytes += message["nbytes"] if "changes" not in message else message["changes"]["bytes"]
        if data is not None and self.segment is not None and "changes" not in message:
            there = self.segment.part(self._rank, message["at"], message["nbytes"])
            await asyncio.to_thread(there.copy_, data)
            data = None
        await connection.send({**message, "shared": data is None}, None if data is None else bytes_of(data))

    async def _read_end(self, connection: Connection) -> None:
        """Waits until the receiver has closed: what is still on the way would be lost if this end closed first."""
        try:
            async with asyncio.timeout(self._patience):
                await connection.receive()
        except TimeoutError:
            self.problem = f"it has read nothing for {self._patience:g} s"
        except OSError:
            pass  # closed; it tells sender 0 whether it has all
