"""The receiving side, on every inference rank: takes pieces from the senders, and makes a version visible at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardkit.weights.boxes import Box, Piece, Wanted, decode, dtype_named, encode
from shardkit.weights.delta import apply
from shardkit.weights.lanes import Lane
from shardkit.weights.packing import bytes_of, unpack
from shardkit.weights.plan import buckets
from shardkit.weights.shared import SharedStaging, Staging
from shardkit.weights.targets import Target
from shardkit.weights.wire import Closing, Connection, IOThread, Message, News, call, listen, parse, secret_for, serve

__all__ = ["SendersClosed", "WeightReceiver"]

_RETRY = 0.2  # seconds
_STEP = 4 << 20  # bytes, after which progress is noted


class SendersClosed(ConnectionError):
    """The senders have closed; nothing more comes from them.

    Remedy: end, or call `receive` again to wait for others at the same address.
    """


@dataclass
class _Layout:
    """The pieces that each sender sends, told once for all versions until something changes.

    Attributes:
        runs: offset, bytes and pieces of each bucket, by sender.
        holds: the name of the version that `staging` has.
    """

    number: int
    bucket: int
    runs: dict[int, list[tuple[int, int, list[Piece]]]]
    staging: Staging | None = None
    holds: int | None = None

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes from each sender."""
        return {rank: sum(nbytes for _, nbytes, _ in runs) for rank, runs in self.runs.items()}


@dataclass
class _Round:
    """A version on its way; `name` is that of all its rounds."""

    number: int
    version: int
    name: int
    layout: _Layout
    missing: dict[int, int]  # bytes that have not come, by sender
    after: Message | None  # the receiver to which this one passes all on, and
    patience: float  # how long it waits for that to read
    problem: str = ""
    committed: bool = False
    moved: float = field(default_factory=time.monotonic)
    sources: dict[asyncio.Task[None], Connection] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    buckets: asyncio.Queue[torch.Tensor] = field(default_factory=asyncio.Queue)  # free ones; all or none exist
    has_buckets: bool = False

    async def bucket(self) -> torch.Tensor:
        """One of two buckets, when it is free."""
        if not self.has_buckets:
            self.has_buckets = True
            for _ in range(2):
                self.buckets.put_nowait(torch.empty(self.layout.bucket, dtype=torch.uint8))
        return await self.buckets.get()

    def release(self, bucket: torch.Tensor | None) -> None:
        """May be filled again. Also after an error: another source may wait for it."""
        if bucket is not None:
            self.buckets.put_nowait(bucket)


@dataclass
class _Bucket:
    """Bytes from a sender: some pieces, or what has changed in them.

    Attributes:
        staged: where they are kept beside the targets.
        memory: one of two buckets, into which they come if they are not kept, or are changes.
    """

    message: Message
    rank: int
    pieces: list[Piece]
    staged: torch.Tensor | None = None
    memory: torch.Tensor | None = None

    @property
    def told(self) -> Message | None:
        return self.message.get("changes")

    @property
    def data(self) -> torch.Tensor:
        if self.memory is not None:
            return self.memory[: int(self.told["bytes"]) if self.told else self.message["nbytes"]]
        assert self.staged is not None
        return self.staged


class WeightReceiver(Closing):
    """Receives weights from `WeightSender`s in other processes; make one in every inference process.

    A version is written into the targets when all of its bytes are here and all other receivers have theirs. Until then
    they are kept beside the targets, in host memory of the targets' size. With `in_place` they are written as they
    come, which takes two buckets of memory.

    Args:
        address: "tcp://host:port", as the senders have it. They may start later, end, and start again.
        targets: what to receive, and where to put it.
        in_place: write at once, because nobody uses the targets during `receive`. If a version fails, they hold parts
            of two, and `valid` is False until one is complete; `receive` waits for that.
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
        self.passed_on = 0  # bytes, to the receiver after this one
        self.valid = not in_place
        self._address, self._in_place, self._timeout = address, in_place, timeout
        self._host, self._port = parse(address)
        self._secret = secret_for(self._host)
        self._id = secrets.token_hex(8)
        self._control: Connection | None = None
        self._layout: _Layout | None = None
        self._round: _Round | None = None
        self._begun = 0  # the last round
        self._segment: SharedStaging | None = None  # of the receiver after this one
        self._waiting = self._offered = self._closed = False
        self._refused = self._last = ""
        self._broken: Exception | None = None
        self._news = News()
        self._io = IOThread()
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
            SendersClosed: if the senders have closed.
            TimeoutError: if no version has come in time; says what it waited for.
            ValueError: if no sender has a tensor that is wanted, or its shape or dtype differs.
        """
        timeout = self._timeout if timeout is None else timeout
        taken = self._io.run(self._take(timeout))
        self.valid = False  # until all is written: an interrupt may come
        self._write(taken)
        self.version, self.valid = taken.version, True
        self._io.run(self._done(taken))
        return taken.version

    def close(self) -> None:
        """Leaves the senders."""
        self._io.close()
        self._control = self._layout = self._round = None

    def _write(self, taken: _Round) -> None:
        """Copies a version from beside the targets into them."""
        if (staging := taken.layout.staging) is None:
            return
        for rank, runs in taken.layout.runs.items():
            for offset, nbytes, pieces in runs:
                self._unpack(pieces, staging.part(rank, offset, nbytes))

    def _unpack(self, pieces: Sequence[Piece], data: torch.Tensor) -> None:
        device = self._views[pieces[0].want][1].device
        unpack(pieces, data.to(device), self._views)
        if device.type == "cuda":  # the data may be overwritten as soon as this returns
            torch.cuda.current_stream(device).synchronize()

    # -- all below runs in the loop

    async def _stay_joined(self) -> None:
        """Joins the senders, and joins them again when they come back."""
        try:
            while True:
                try:
                    await self._take_part()
                except (OSError, TimeoutError) as error:
                    self._last = f"sender 0 at {self._address}: {error or 'no answer'}"
                await asyncio.sleep(_RETRY)
        except Exception as error:  # noqa: BLE001 - raised by receive()
            self._broken = error
            self._news.tell()

    async def _take_part(self) -> None:
        """Is joined, until the connection ends."""
        connection = await call(self._host, self._port, self._secret)
        listener = listen(connection.own_host, 0)
        host, port = listener.getsockname()[:2]
        serving = asyncio.create_task(serve(listener, self._secret, self._source))
        try:
            hello = {"as": "receiver", "id": self._id, "name": self.name, "host": host, "port": port}
            await connection.send({**hello, "wants": encode(self._wants)})
            connection.beat()
            self._control, self._closed, self._refused = connection, False, ""
            self._news.tell()
            while True:
                await self._act(await connection.hear(self._timeout))
                self._news.tell()
        finally:
            serving.cancel()
            connection.close()
            self._control, self._layout, self._offered = None, None, False
            if self._round is not None:
                self._fail(self._round, "sender 0 is gone")

    async def _say(self, message: Message) -> None:
        """Tells sender 0; if it is gone, that is seen where it is heard."""
        with contextlib.suppress(OSError):
            if self._control is not None:
                await self._control.send(message)

    async def _act(self, message: Message) -> None:
        """Acts on a message of sender 0."""
        found = self._round if self._round is not None and self._round.number == message.get("round") else None
        match message["op"]:
            case "layout":
                pieces = {int(rank): decode(Piece, one) for rank, one in message["senders"].items()}
                bucket = int(message["bucket"])
                runs = {rank: buckets(one, bucket) for rank, one in pieces.items()}
                self._layout = _Layout(int(message["number"]), bucket, runs)
                self._refused = self._misfit()
                if self._waiting and not self._refused:
                    await self._ready()
            case "offered":
                self._offered = True
            case "over":
                self._offered = False
            case "begin":
                await self._begin(message)
            case "commit" if found is not None:
                found.committed = not found.problem
            case "abort" if found is not None:
                self._fail(found, str(message["reason"]))
            case "refused":
                self._refused = str(message["reason"])
            case "bye":
                self._closed = True

    def _misfit(self) -> str:
        """Why a piece cannot be cast to what it is written into; "" if all can."""
        assert self._layout is not None
        for piece in (piece for runs in self._layout.runs.values() for _, _, pieces in runs for piece in pieces):
            here = self._views[piece.want][1].dtype
            there = dtype_named(piece.dtype)
            # Values of float8 mean nothing without a scale.
            castable = here.is_floating_point and there.is_floating_point and min(here.itemsize, there.itemsize) > 1
            if here != there and not castable:
                return f"{piece.name}: sent as {piece.dtype}, its target is {here}; receive into one of that dtype"
        return ""

    async def _ready(self) -> None:
        """Says that this receiver waits for a version."""
        layout = self._layout
        if layout is None:
            return
        place = None
        if not self._in_place:
            if layout.staging is None:
                layout.staging, layout.holds = Staging(layout.sizes), None
            place = layout.staging.place()
        await self._say({"op": "ready", "layout": layout.number, "segment": place, "base": layout.holds})

    async def _begin(self, message: Message) -> None:
        self._begun = int(message["round"])
        if not self._waiting or self._layout is None or self._round is not None:
            await self._say({"op": "failed", "round": self._begun, "reason": "it does not wait in receive()"})
            return
        self._round = _Round(
            self._begun,
            int(message["version"]),
            int(message["name"]),
            self._layout,
            {rank: nbytes for rank, nbytes in self._layout.sizes.items() if nbytes},
            message["next"],
            message["patience"] * self._timeout,
        )
        if self._round.after is not None:
            self._segment = SharedStaging.opened(self._round.after["segment"], self._segment)

    def _fail(self, found: _Round, reason: str) -> None:
        if not found.problem:
            found.problem = reason
            self._news.tell()

    async def _source(self, connection: Connection) -> None:
        """Takes what one sender sends in one round, from it or from the receiver before this one."""
        hello = await connection.receive()
        rank, number = int(hello["rank"]), int(hello["round"])
        if hello["receiver"] != self._id:
            return
        await self._news.until(lambda: self._begun >= number, self._timeout)
        found = self._round
        if found is None or found.number != number or found.problem or not found.missing.get(rank):
            return
        task = asyncio.current_task()
        assert task is not None
        found.sources[task] = connection
        lane, passing = None, None
        if found.after is not None:
            lane = Lane(found.after, rank, self._segment, self._secret, found.patience)
            found.lanes.append(lane)
            passing = asyncio.create_task(lane.run(number))
        try:
            await self._take_buckets(found, connection, rank, lane)
            del found.missing[rank]
        except Exception as error:  # noqa: BLE001 - whatever it is, the version is not complete
            left = found.missing[rank]
            self._fail(found, f"the bytes of sender {rank} ended with {left} to come: {error!r}")
        finally:
            del found.sources[task]
            self._news.tell()
            connection.close()
            if lane is not None and passing is not None:
                lane.end(found.problem)
                await passing

    async def _take_buckets(self, found: _Round, connection: Connection, rank: int, lane: Lane | None) -> None:
        """While one bucket comes, the one before it is used."""
        before: asyncio.Task[None] | None = None
        try:
            for offset, nbytes, pieces in found.layout.runs[rank]:
                message = await connection.receive()
                if (message.get("at"), message.get("nbytes")) != (offset, nbytes):
                    raise ConnectionError(f"it sends {message}, expected {nbytes} bytes at {offset}")
                one = _Bucket(message, rank, pieces)
                if found.layout.staging is not None:
                    one.staged = found.layout.staging.part(rank, offset, nbytes)
                try:
                    if one.staged is None or one.told:
                        one.memory = await found.bucket()
                    if not message["shared"]:
                        await self._fill(found, connection, one.data)
                    if before is not None:
                        await before
                except BaseException:
                    found.release(one.memory)
                    raise
                before = asyncio.create_task(self._use(found, one, lane))
            if before is not None:
                await before
        finally:
            if before is not None:
                await asyncio.wait([before])  # what is given up must not be written later

    async def _fill(self, found: _Round, connection: Connection, data: torch.Tensor) -> None:
        memory = bytes_of(data)
        for start in range(0, len(memory), _STEP):
            await connection.receive_into(memory[start : start + _STEP])
            found.moved = time.monotonic()

    async def _use(self, found: _Round, one: _Bucket, lane: Lane | None) -> None:
        """Writes a bucket, or its changes, and passes it on."""
        sent = asyncio.Event()
        # The next receiver may lack what the changes are to.
        whole_next = one.told and found.after is not None and found.after["base"] != found.layout.holds
        try:
            if lane is not None and not whole_next:
                lane.put(one.message, one.data, sent.set)
            if one.staged is None:
                self.valid, self.version = False, None
                await asyncio.to_thread(self._unpack, one.pieces, one.data)
            elif one.told:
                await asyncio.to_thread(apply, one.told, one.data, one.staged)
            if lane is not None and whole_next:
                lane.put({"at": one.message["at"], "nbytes": one.message["nbytes"]}, one.staged, sent.set)
            if lane is not None and one.memory is not None:
                await sent.wait()
        finally:
            found.release(one.memory)
        found.missing[one.rank] -= one.message["nbytes"]
        found.moved = time.monotonic()

    async def _take(self, within: float) -> _Round:
        """Waits until a version is complete and all take it."""
        deadline = time.monotonic() + within
        self._waiting = True
        try:
            await self._ready()
            while not await self._complete(found := await self._next(deadline, within)):
                await self._give_up(found)
                await self._ready()
            return found
        except asyncio.CancelledError:  # an interrupt of the caller
            if self._round is not None and not self._round.committed:
                self._fail(self._round, "receive() was interrupted")
                await self._give_up(self._round)
            raise
        finally:
            self._waiting = False

    async def _next(self, deadline: float, within: float) -> _Round:
        """The next round that this receiver takes part in."""
        await self._news.until(
            lambda: bool(self._round or self._refused or self._closed or self._broken), deadline - time.monotonic()
        )
        if self._broken is not None:
            raise self._broken
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
        """Whether all bytes come, and all receivers take the version."""
        while found.missing and not found.problem:
            quiet = time.monotonic() - found.moved
            if quiet > self._timeout:
                left = ", ".join(f"{nbytes} bytes of sender {rank}" for rank, nbytes in found.missing.items())
                self._fail(found, f"nothing has come for {self._timeout:g} s; still missing: {left}")
            limit = max(self._timeout - quiet, 0) + 0.01
            await self._news.until(lambda: not found.missing or bool(found.problem), limit)
        if not found.problem:
            await self._say({"op": "staged", "round": found.number})
            # Others may be slower. Sender 0 sees to it that they end, and that it lives is seen where it is heard.
            await self._news.until(lambda: found.committed or bool(found.problem))
        return found.committed

    async def _give_up(self, found: _Round) -> None:
        """Leaves a round; what was written in place stays, and is not valid."""
        self._last = f"version {found.version}: {found.problem}"
        sources = list(found.sources)
        # Closed rather than cancelled: a bucket that is being written in a thread must not be written later.
        for connection in found.sources.values():
            connection.close()
        for lane in found.lanes:
            lane.end("a receiver before it in the chain has failed")
        if sources:
            await asyncio.wait(sources)
        found.layout.staging = None  # a sender that comes late may still write there
        if self._round is found:
            self._round = None
        await self._say({"op": "failed", "round": found.number, "reason": found.problem})

    async def _done(self, taken: _Round) -> None:
        for lane in taken.lanes:
            lane.end("the version is complete")  # all others have ended
        self._round, self._offered = None, False
        self.passed_on += sum(lane.nbytes for lane in taken.lanes)
        taken.layout.holds = None if taken.layout.staging is None else taken.name
        await self._say({"op": "taken", "round": taken.number})
