"""Buckets on their way from a process that has them, a sender or a receiver, to a receiver that asks for them.

A receiver keeps one connection for the bytes of each sender. In every round it asks for the buckets from a certain one
on, and gets them in order, then a message that these were all. Data follows its message through the socket, unless
"by" says that it lies in memory that both share ("memory"), or goes from GPU to GPU ("device").
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import torch

from shardkit.weights import devices, shared
from shardkit.weights.devices import Link
from shardkit.weights.packing import bytes_of
from shardkit.weights.wire import Connection, Message

Ready = Callable[[int], Awaitable[None]]
Packed = Callable[[int, "Bucket"], Awaitable[tuple[Message, torch.Tensor | None]]]


class Bucket:
    """Memory on every device on which it is asked for."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device, nbytes: int) -> torch.Tensor:
        if device not in self._memory:
            pinned = device.type == "cpu" and bool(self._memory)  # there is some on a GPU
            self._memory[device] = torch.empty(self._nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        return self._memory[device][:nbytes]


class Buckets(asyncio.Queue[Bucket]):
    """The free ones of the two of a process."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.put_nowait(Bucket(nbytes))
        self.put_nowait(Bucket(nbytes))


class Outlet:
    """The end that has the buckets of a sender, in the loop of an `IOThread`.

    Attributes:
        segment: memory that the receiver shares with this process.
        nbytes: bytes of values that have been sent since the receiver asked.
    """

    segment: torch.Tensor | None = None
    _place: Message | None = None  # of `segment`

    def __init__(self, connection: Connection, hello: Message, patience: float) -> None:
        self._connection, self._hello, self._patience = connection, hello, patience
        self.nbytes = 0

    def link(self, device: torch.device) -> Link | None:
        """The way from a device to that of the receiver; None: through the host."""
        if self._connection.link is None:
            self._connection.link = devices.link_to(self._hello["device"], device, self._patience)
        link: Link | None = self._connection.link
        return link

    async def asked(self) -> Message:
        ask = await self._connection.receive()
        self.nbytes = 0
        if ask["segment"] != self._place:
            self._place, self.segment = ask["segment"], shared.opened(ask["segment"])
        return ask

    async def send(self, numbers: range, free: Buckets, ready: Ready, packed: Packed) -> None:
        """Sends buckets, each as `packed` makes it when it is `ready`: its message, and data unless that is in
        `segment`. While one is sent, the next is packed. Says that these were all when that after the last is `ready`.
        Raises TimeoutError if the receiver does not read one for some time.
        """
        before: asyncio.Task[None] | None = None
        try:
            for number in numbers:
                await ready(number)  # before it takes a bucket that others may need to make it ready
                bucket = await free.get()
                before = asyncio.create_task(self._send(number, bucket, free, packed, before))
                before.add_done_callback(lambda one: one.cancelled() or one.exception())  # if nobody awaits it any more
        finally:
            if before is not None:
                await asyncio.wait([before])  # a thread may be filling its bucket
        if before is not None:
            await before
        await ready(numbers.stop)
        await self._connection.send({"op": "end"})

    async def _send(
        self, number: int, bucket: Bucket, free: Buckets, packed: Packed, before: asyncio.Task[None] | None
    ) -> None:
        try:
            message, data = await packed(number, bucket)
            if before is not None:
                await before
            async with asyncio.timeout(self._patience):
                await self._send_one(message, data)
            self.nbytes += message["nbytes"] if "changes" not in message else message["changes"]["bytes"]
        finally:
            free.put_nowait(bucket)

    async def _send_one(self, message: Message, data: torch.Tensor | None) -> None:
        whole = "changes" not in message
        if whole and data is not None and (link := self.link(data.device)) is not None:
            await self._connection.send({**message, "by": "device", "link": link.told(data)})
            # Its answer: it has read the bucket. The end of its process is seen there too.
            await asyncio.gather(asyncio.to_thread(link.send, data), self._connection.receive())
        elif whole and self.segment is not None:
            if data is not None:
                there = self.segment[message["at"] : message["at"] + message["nbytes"]]
                await asyncio.to_thread(there.copy_, data)
            await self._connection.send({**message, "by": "memory"})
        else:
            assert data is not None
            await self._connection.send({**message, "by": "socket"}, bytes_of(data.cpu()))


async def read(connection: Connection, message: Message, data: torch.Tensor) -> None:
    """Reads the bucket of a message. Raises ConnectionError; TimeoutError if nothing comes for some time."""
    if message["by"] == "socket":
        await connection.receive_into(bytes_of(data))
    elif message["by"] == "device":
        if connection.link is None:
            assert connection.patience is not None
            connection.link = devices.link_by(message["link"], connection.hosts[1], data.device, connection.patience)
        async with asyncio.timeout(connection.patience):
            await asyncio.to_thread(connection.link.receive, message["link"], data)
        await connection.send({"op": "read"})
