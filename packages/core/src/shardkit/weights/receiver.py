"""The receiving side, on every inference rank: takes pieces from the senders, and makes a version visible at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch

from shardkit.weights.boxes import Box, Piece, Wanted, decode, dtype_named, encode
from shardkit.weights.delta import apply
from shardkit.weights.packing import bytes_of, unpack
from shardkit.weights.plan import buckets
from shardkit.weights.shared import Staging
from shardkit.weights.targets import Target
from shardkit.weights.wire import Connection, IOThread, Message, call, listen, parse, secret_for, serve

__all__ = ["SendersClosed", "WeightReceiver"]

_RETRY = 0.2  # seconds
_STEP = 4 << 20  # bytes, after which progress is noted


class SendersClosed(ConnectionError):
    """The senders have closed; nothing more comes from them.

    Remedy: end, or call `receive` again to wait for others at the same address.
    """


@dataclass
class _Layout:
    """The pieces that each sender sends, told once for all versions until something changes."""

    number: int
    bucket: int
    pieces: dict[int, list[Piece]]
    staging: Staging | None = None
    holds: str | None = None  # the name of the version that `staging` has

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes from each sender."""
        return {rank: sum(piece.nbytes for piece in pieces) for rank, pieces in self.pieces.items()}


@dataclass
class _Round:
    """A version on its way."""

    number: int
    version: int
    name: str  # unlike the version, never used again
    layout: _Layout
    missing: dict[int, int]  # bytes that have not come, by sender
    problem: str = ""
    committed: bool = False
    wrote: bool = False  # into targets, before the version is complete
    moved: float = field(default_factory=time.monotonic)
    sources: dict[asyncio.Task[None], Connection] = field(default_factory=dict)


class WeightReceiver:
    """Receives weights from `WeightSender`s in other processes; make one in every inference process.

    A version is written into the targets when all of its bytes are here and all other receivers have theirs. Until then
    they are kept beside the targets, in host memory of the targets' size. With `in_place` they are written as they
    come, which takes two buckets of memory.

    Args:
        address: "tcp://host:port", as the senders have it. They may start later, end, and start again.
        targets: what to receive, and where to put it.
        in_place: write at once, because nobody uses the targets during `receive`. If it fails, they hold parts of two
            versions, and `valid` is False until the next version.
        timeout: seconds to wait for a version in `receive`, and for the next bytes of one that is coming.
        name: the name in errors of senders; None: host and process.

    Raises:
        ValueError: if the address is not a TCP address, or on another host without a secret; if there is no target.
    """

    def __init__(
        self,
        address: str,
        targets: Sequence[Target],
        *,
        in_place: bool = False,
        timeout: float = 300.0,
        name: str | None = None,
    ) -> None:
        if not targets:
            raise ValueError("a receiver without targets; pass those of targets_of or targets_for")
        self._wants: list[Wanted] = []
        self._views: list[tuple[Box, torch.Tensor]] = []
        for target in targets:
            for want, view in target.parts():
                self._wants.append(want)
                self._views.append((want.box, view))
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.version: int | None = None
        self.valid = not in_place
        self._address, self._in_place, self._timeout = address, in_place, timeout
        self._host, self._port = parse(address)
        self._secret = secret_for(self._host)
        self._id = secrets.token_hex(8)
        self._control: Connection | None = None
        self._layout: _Layout | None = None
        self._round: _Round | None = None
        self._waiting = self._offered = self._closed = False
        self._refused = self._last = ""
        self._io = IOThread()
        self._io.run(self._start())
        self._io.spawn(self._stay_joined())

    @property
    def offered(self) -> bool:
        """Whether the senders wait for this receiver with a version that it does not have. Not collective."""
        return self._offered

    def receive(self, timeout: float | None = None) -> int:
        """Waits for the next version, writes it into the targets, and returns its number.

        Versions that could not be completed are skipped: the targets keep what they had, and it waits for the next. It
        is not collective, but a version is taken by all receivers that are here when it is sent, or by none of them if
        a sender fails.

        Args:
            timeout: seconds to wait for a version to come; None: as given to the receiver.

        Raises:
            ConnectionError: with `in_place`, if a version failed when a part of it was written.
            SendersClosed: if the senders have closed.
            TimeoutError: if no version has come in time; says what it waited for.
            ValueError: if no sender has a tensor that is wanted, or its shape or dtype differs.
        """
        timeout = self._timeout if timeout is None else timeout
        taken = self._io.run(self._take(timeout))
        if not self._in_place:
            self.valid = False  # until all is written: an interrupt may come
            self._write(taken)
        self.version, self.valid = taken.version, True
        self._io.run(self._done(taken))
        return taken.version

    def close(self) -> None:
        """Leaves the senders."""
        self._io.close()
        if self._control is not None:
            self._control = None
        self._layout = self._round = None

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, taken: _Round) -> None:
        """Copies a version from beside the targets into them."""
        layout = taken.layout
        assert layout.staging is not None
        for rank, pieces in layout.pieces.items():
            for offset, nbytes, run in buckets(pieces, layout.bucket):
                self._unpack(run, layout.staging.part(rank, offset, nbytes))

    def _unpack(self, pieces: Sequence[Piece], data: torch.Tensor) -> None:
        device = self._views[pieces[0].want][1].device
        unpack(pieces, data.to(device), self._views)
        if device.type == "cuda":  # the data may be overwritten as soon as this returns
            torch.cuda.current_stream(device).synchronize()

    # -- all below runs in the loop

    async def _start(self) -> None:
        self._changed = asyncio.Event()
        self._free: asyncio.Queue[torch.Tensor] = asyncio.Queue()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool], within: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not condition():
                    await self._changed.wait()
        return condition()

    async def _stay_joined(self) -> None:
        """Joins the senders, and joins them again when they come back."""
        serving: asyncio.Task[None] | None = None
        while True:
            try:
                connection = await call(self._host, self._port, self._secret)
                listener = listen(connection.own_host, 0)
                host, port = listener.getsockname()[:2]
                serving = asyncio.create_task(serve(listener, self._secret, self._source))
                hello = {"as": "receiver", "id": self._id, "name": self.name, "host": host, "port": port}
                await connection.send({**hello, "wants": encode(self._wants)})
                self._control, self._closed, self._refused = connection, False, ""
                self._tell()
                while True:
                    await self._hear(await connection.receive())
                    self._tell()
            except (OSError, TimeoutError) as error:
                self._last = f"sender 0 at {self._address}: {error or 'no answer'}"
            finally:
                if serving is not None:
                    serving.cancel()
                if self._control is not None:
                    self._control.close()
                self._control, self._layout, self._offered = None, None, False
                self._fail("sender 0 is gone")
            await asyncio.sleep(_RETRY)

    async def _hear(self, message: Message) -> None:
        """Acts on a message of sender 0."""
        match message["op"]:
            case "layout":
                pieces = {int(rank): decode(Piece, one) for rank, one in message["senders"].items()}
                self._layout = _Layout(int(message["number"]), int(message["bucket"]), pieces)
                self._refused = self._misfit()
                if self._waiting and not self._refused:
                    await self._ready()
            case "offered":
                self._offered = True
            case "over":
                self._offered = False
            case "begin":
                await self._begin(message)
            case "commit" if self._round is not None and self._round.number == message["round"]:
                self._round.committed = not self._round.problem
            case "abort" if self._round is not None and self._round.number == message["round"]:
                self._fail(str(message["reason"]))
            case "refused":
                self._refused = str(message["reason"])
            case "bye":
                self._closed = True

    def _misfit(self) -> str:
        """Why a piece cannot be cast to what it is written into; "" if all can."""
        assert self._layout is not None
        for pieces in self._layout.pieces.values():
            for piece in pieces:
                here = self._views[piece.want][1].dtype
                there = dtype_named(piece.dtype)
                if here != there and not (here.is_floating_point and there.is_floating_point):
                    return f"{piece.name}: sent as {piece.dtype}, its target is {here}; expected one of this dtype"
        return ""

    async def _ready(self) -> None:
        """Says that this receiver waits for a version."""
        layout = self._layout
        if layout is None or self._control is None:
            return
        place = None
        if not self._in_place:
            if layout.staging is None:
                layout.staging, layout.holds = Staging(layout.sizes), None
            place = layout.staging.place()
        await self._control.send({"op": "ready", "layout": layout.number, "segment": place, "base": layout.holds})

    async def _begin(self, message: Message) -> None:
        number = int(message["round"])
        if not self._waiting or self._layout is None:
            assert self._control is not None
            reason = "it has stopped waiting in receive()"
            await self._control.send({"op": "failed", "round": number, "reason": reason})
            return
        missing = {rank: nbytes for rank, nbytes in self._layout.sizes.items() if nbytes}
        self._round = _Round(number, int(message["version"]), str(message["id"]), self._layout, missing)

    def _fail(self, reason: str) -> None:
        if self._round is not None and not self._round.problem:
            self._round.problem = reason
            self._tell()

    async def _source(self, connection: Connection) -> None:
        """Takes what one sender sends in one round."""
        hello = await connection.receive()
        rank, number = int(hello["rank"]), int(hello["round"])
        if hello["receiver"] != self._id:
            return
        there = await self._until(lambda: self._round is not None and self._round.number >= number, self._timeout)
        found = self._round
        if not there or found is None or found.number != number or not found.missing.get(rank):
            return
        task = asyncio.current_task()
        assert task is not None
        found.sources[task] = connection
        try:
            for offset, nbytes, run in buckets(found.layout.pieces[rank], found.layout.bucket):
                message = await connection.receive()
                if (message.get("at"), message.get("nbytes")) != (offset, nbytes):
                    raise ConnectionError(f"it sends {message}, expected {nbytes} bytes at {offset}")
                await self._take_bucket(found, connection, message, run, rank)
            del found.missing[rank]
        except Exception as error:  # noqa: BLE001 - whatever it is, the version is not complete
            left = found.missing[rank]
            self._fail(f"the connection to sender {rank} was lost with {left} bytes to come: {error!r}")
        finally:
            del found.sources[task]
            self._tell()

    async def _take_bucket(
        self, found: _Round, connection: Connection, message: Message, run: list[Piece], rank: int
    ) -> None:
        offset, nbytes = message["at"], message["nbytes"]
        if found.layout.staging is not None:
            data = found.layout.staging.part(rank, offset, nbytes)
            if told := message.get("changes"):
                changed = torch.empty(min(int(told["bytes"]), nbytes), dtype=torch.uint8)
                await connection.receive_into(bytes_of(changed))
                await asyncio.to_thread(apply, told, changed, data)
            elif not message.get("shared"):
                await self._fill(found, connection, data, rank)
        else:
            bucket = await self._free_bucket(nbytes, found.layout.bucket)
            try:
                await self._fill(found, connection, bucket[:nbytes], rank)
                found.wrote = True
                await asyncio.to_thread(self._unpack, run, bucket[:nbytes])
            finally:
                self._free.put_nowait(bucket)
        if message.get("shared") or message.get("changes"):
            found.missing[rank] -= nbytes
            found.moved = time.monotonic()

    async def _fill(self, found: _Round, connection: Connection, data: torch.Tensor, rank: int) -> None:
        memory = bytes_of(data)
        for start in range(0, len(memory), _STEP):
            step = memory[start : start + _STEP]
            await connection.receive_into(step)
            found.missing[rank] -= len(step)
            found.moved = time.monotonic()

    async def _free_bucket(self, nbytes: int, limit: int) -> torch.Tensor:
        """One of two buckets."""
        if not hasattr(self, "_buckets"):
            largest = max(nbytes, limit)
            self._buckets = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]
            for one in self._buckets:
                self._free.put_nowait(one)
        return await self._free.get()

    async def _take(self, within: float) -> _Round:
        """Waits until a version is complete and all take it."""
        deadline = time.monotonic() + within
        self._waiting = True
        try:
            await self._ready()
            while True:
                found = await self._next(deadline, within)
                if not await self._complete(found) or not await self._agreed(found):
                    await self._give_up(found)
                    continue
                return found
        finally:
            self._waiting = False

    async def _next(self, deadline: float, within: float) -> _Round:
        """The next round that this receiver takes part in."""
        await self._until(
            lambda: self._round is not None or bool(self._refused) or self._closed, deadline - time.monotonic()
        )
        if self._round is not None:
            return self._round
        if self._refused:
            raise ValueError(self._refused)
        if self._closed:
            self._closed = False
            raise SendersClosed(f"the senders at {self._address} have closed")
        awaited = "the senders to send a version" if self._control is not None else "sender 0 to listen"
        last = f"; the last failure: {self._last}" if self._last else ""
        raise TimeoutError(f"no version within {within:g} s: waited for {awaited}{last}; read the senders' logs")

    async def _complete(self, found: _Round) -> bool:
        """Whether all bytes come."""
        while found.missing and not found.problem:
            quiet = time.monotonic() - found.moved
            if quiet > self._timeout:
                left = ", ".join(f"{nbytes} bytes of sender {rank}" for rank, nbytes in found.missing.items())
                self._fail(f"nothing has come for {self._timeout:g} s; still missing: {left}")
            await self._until(lambda: not found.missing or bool(found.problem), max(self._timeout - quiet, 0) + 0.01)
        return not found.problem

    async def _agreed(self, found: _Round) -> bool:
        """Whether all receivers take the version."""
        with contextlib.suppress(OSError):
            if self._control is not None:
                await self._control.send({"op": "staged", "round": found.number})
        # Others may be slower; sender 0 sees to it that they end.
        await self._until(lambda: found.committed or bool(found.problem), 4 * self._timeout)
        if not found.committed:
            self._fail(f"sender 0 has not said within {4 * self._timeout:g} s whether to take the version")
        return found.committed

    async def _give_up(self, found: _Round) -> None:
        """Leaves a round; with `in_place` it raises if a part has been written."""
        self._last = f"version {found.version}: {found.problem}"
        for connection in list(found.sources.values()):
            connection.close()
        if found.sources:
            await asyncio.wait(list(found.sources))  # a bucket that is being written must not be written later
        found.layout.staging = None  # a sender that comes late may still write there
        self._round = None
        if self._control is not None:
            with contextlib.suppress(OSError):
                await self._control.send({"op": "failed", "round": found.number, "reason": found.problem})
        if found.wrote:
            self.valid, self.version = False, None
            raise ConnectionError(
                f"version {found.version} has failed when a part of it was written in place: {found.problem}; "
                "call receive() again before you use the weights"
            )
        await self._ready()

    async def _done(self, taken: _Round) -> None:
        self._round, self._offered = None, False
        taken.layout.holds = None if taken.layout.staging is None else taken.name
        with contextlib.suppress(OSError):
            if self._control is not None:
                await self._control.send({"op": "done", "round": taken.number})
