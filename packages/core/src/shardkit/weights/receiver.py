"""The receiving side, on every inference rank: takes pieces from the senders, and makes a version visible at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardkit.weights.boxes import Piece, decode, dtype_named, encode
from shardkit.weights.delta import apply
from shardkit.weights.packing import Values, pack, unpack
from shardkit.weights.plan import buckets
from shardkit.weights.shared import Staging
from shardkit.weights.streams import Bucket, Buckets, Inlet, Outlet
from shardkit.weights.targets import Target
from shardkit.weights.wire import Closing, Connection, IOThread, Message, News, join, parse, secret_for

__all__ = ["SendersClosed", "WeightReceiver"]

_RETRY = 0.2  # seconds


class SendersClosed(ConnectionError):
    """The senders have closed; nothing more comes from them.

    Remedy: end, or call `receive` again to wait for others at the same address.
    """


@dataclass
class _Layout:
    """The pieces that each sender sends, told once for all versions until something changes.

    Attributes:
        runs: offset, bytes and pieces of each bucket, by sender; `senders` has where it is, and its pieces.
        holds: the version that `staging` has, by the number of its round.
    """

    number: int
    senders: dict[int, tuple[Message, list[list[Any]]]]
    runs: dict[int, list[tuple[int, int, list[Piece]]]]
    staging: Staging | None = None
    holds: int | None = None


@dataclass
class _Round:
    """A version on its way.

    Attributes:
        before: the receiver from which this one gets all, if it is not from the senders.
        done: how many buckets of each sender are where they belong.
        changes: those that have come, by sender and number of the bucket, for the receiver after this one.
    """

    number: int
    version: int
    layout: _Layout
    before: Message | None
    problem: str = ""
    committed: bool = False
    done: Counter[int] = field(default_factory=Counter)
    changes: dict[tuple[int, int], tuple[Message, torch.Tensor]] = field(default_factory=dict)
    pulls: list[asyncio.Task[None]] = field(default_factory=list)


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
        self._set_targets(targets)
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
        self._free = Buckets(0)
        self._inlets: dict[tuple[str, int], Inlet] = {}  # by process, and the sender whose bytes come
        self._device = self._views[0].tensor.device
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

    def _set_targets(self, targets: Sequence[Target]) -> None:
        parts = [part for target in targets for part in target.parts()]
        self._wants = [want for want, _ in parts]
        self._views = [Values(want.box, view) for want, view in parts]

    def _write(self, taken: _Round) -> None:
        """Copies a version from beside the targets into them."""
        if (staging := taken.layout.staging) is None:
            return
        for rank, runs in taken.layout.runs.items():
            for offset, nbytes, pieces in runs:
                self._unpack(pieces, staging.part(rank, offset, nbytes))

    def _unpack(self, pieces: Sequence[Piece], data: torch.Tensor) -> None:
        device = self._views[pieces[0].want].tensor.device
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
        hello = {"as": "receiver", "id": self._id, "name": self.name, "wants": encode(self._wants)}
        connection = await join(self._host, self._port, self._secret, hello, self._pass_on)
        try:
            self._control, self._closed, self._refused = connection, False, ""
            self._news.tell()
            while True:
                await self._act(await connection.hear(self._timeout))
                self._news.tell()
        finally:
            connection.close()
            self._control, self._layout, self._offered = None, None, False
            self._close_inlets(set())
            if self._round is not None:
                self._fail(self._round, "sender 0 is gone")

    def _close_inlets(self, but: set[str]) -> None:
        """Those to processes that no bytes are to come from any more."""
        for key in [key for key in self._inlets if key[0] not in but]:
            self._inlets.pop(key).close()

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
                senders, bucket = {int(rank): one for rank, one in message["senders"].items()}, int(message["bucket"])
                runs = {rank: buckets(decode(Piece, pieces), bucket) for rank, (_, pieces) in senders.items()}
                self._layout, self._free = _Layout(int(message["number"]), senders, runs), Buckets(bucket)
                self._close_inlets(set())  # their pieces are others
                self._refused = self._misfit()
                if self._refused:
                    await self._say({"op": "refuses", "layout": self._layout.number, "reason": self._refused})
                elif self._waiting:
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
            case "lost":
                self._close_inlets({key for key, _ in self._inlets} - {message["id"]})
            case "refused":
                self._refused = str(message["reason"])
            case "bye":
                self._closed = True

    def _misfit(self) -> str:
        """Why a piece cannot be cast to what it is written into; "" if all can."""
        assert self._layout is not None
        for piece in (piece for runs in self._layout.runs.values() for _, _, pieces in runs for piece in pieces):
            here = self._views[piece.want].tensor.dtype
            there = dtype_named(piece.dtype)
            # Values of float8 mean nothing without a scale.
            castable = here.is_floating_point and there.is_floating_point and min(here.itemsize, there.itemsize) > 1
            if here != there and not castable:
                return f"{piece.name}: sent as {piece.dtype}, its target is {here}; receive into one of that dtype"
        return ""

    async def _ready(self) -> None:
        """Says that this receiver waits for a version."""
        if (layout := self._layout) is None or self._refused:
            return
        if not self._in_place and layout.staging is None:
            sizes = {rank: sum(nbytes for _, nbytes, _ in runs) for rank, runs in layout.runs.items()}
            layout.staging, layout.holds = Staging(sizes), None
        await self._say({"op": "ready", "layout": layout.number, "base": layout.holds})

    async def _begin(self, message: Message) -> None:
        self._begun = int(message["round"])
        if not self._waiting or self._layout is None or self._round is not None:
            await self._say({"op": "failed", "round": self._begun, "reason": "it does not wait in receive()"})
            return
        layout, before = self._layout, message["before"]
        found = _Round(self._begun, int(message["version"]), layout, before)
        self._close_inlets({before["id"]} if before else {place["id"] for place, _ in layout.senders.values()})
        found.pulls = [asyncio.create_task(self._pull(found, rank)) for rank, runs in layout.runs.items() if runs]
        for task in found.pulls:
            task.add_done_callback(lambda _: self._news.tell())
        self._round = found

    def _fail(self, found: _Round, reason: str) -> None:
        if not found.problem:
            found.problem = reason
            self._news.tell()

    # -- the bytes of one sender

    async def _pull(self, found: _Round, rank: int) -> None:
        """Gets them from the receiver before this one, or from the sender; the whole if changes do not fit."""
        layout = found.layout
        sender, pieces = layout.senders[rank]
        ways = [(sender, layout.holds), (sender, None)] if layout.holds else [(sender, None)]
        for place, base in [(found.before, layout.holds), *ways] if found.before else ways:
            key = (place["id"], rank)
            try:
                if key not in self._inlets:
                    hello = {"rank": rank, "pieces": pieces if place is sender else None}
                    self._inlets[key] = await Inlet.opened(place, self._secret, self._device, self._timeout, hello)
                await self._pull_from(self._inlets[key], found, rank, base)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the version is not complete
                problem = str(error) or repr(error)
                if key in self._inlets:
                    self._inlets.pop(key).close()
            if found.problem:
                return
        left = sum(nbytes for _, nbytes, _ in layout.runs[rank][found.done[rank] :])
        self._fail(found, f"the bytes of sender {rank} ended with {left} to come: {problem}")

    async def _pull_from(self, inlet: Inlet, found: _Round, rank: int, base: int | None) -> None:
        """While one bucket comes, the one before it is used."""
        layout, first = found.layout, found.done[rank]
        segment = layout.staging.place(rank) if layout.staging is not None else None
        ask = {"round": found.number, "version": found.version, "first": first, "base": base, "segment": segment}
        await inlet.ask(ask)
        before: asyncio.Task[None] | None = None
        try:
            for number in range(first, len(layout.runs[rank])):
                message = await inlet.next()
                offset, nbytes, _ = layout.runs[rank][number]
                if (message.get("at"), message.get("nbytes")) != (offset, nbytes):
                    raise ConnectionError(f"it sends {message}, expected {nbytes} bytes at {offset}")
                by_device = message["by"] == "device"
                bucket = None
                if changes := message.get("changes"):
                    data = torch.empty(min(int(changes["bytes"]), nbytes), dtype=torch.uint8)
                elif layout.staging is None or by_device:
                    bucket = await self._free.get()
                    data = bucket.on(self._device if by_device else torch.device("cpu"), nbytes)
                else:
                    data = layout.staging.part(rank, offset, nbytes)
                try:
                    await inlet.read(message, data)
                    if before is not None:
                        await before
                except BaseException:
                    if bucket is not None:
                        self._free.put_nowait(bucket)
                    raise
                before = asyncio.create_task(self._use(found, rank, number, changes, data, bucket))
            if before is not None:
                await before
            await inlet.next()  # that all are as they were sent
        finally:
            if before is not None:
                await asyncio.wait([before])  # what is given up must not be written later

    async def _use(
        self, found: _Round, rank: int, number: int, changes: Message | None, data: torch.Tensor, bucket: Bucket | None
    ) -> None:
        """Writes a bucket, or its changes, to where it belongs."""
        offset, nbytes, pieces = found.layout.runs[rank][number]
        try:
            if found.layout.staging is None:
                self.valid, self.version = False, None
                await asyncio.to_thread(self._unpack, pieces, data)
            elif changes:
                await asyncio.to_thread(apply, changes, data, pieces, found.layout.staging.part(rank, offset, nbytes))
                found.changes[rank, number] = changes, data
            elif bucket is not None:
                await asyncio.to_thread(found.layout.staging.part(rank, offset, nbytes).copy_, data)
        finally:
            if bucket is not None:
                self._free.put_nowait(bucket)
        found.done[rank] = number + 1
        self._news.tell()

    async def _pass_on(self, connection: Connection) -> None:
        """Sends the receiver after this one what has come from one sender, in version after version."""
        hello = await connection.receive()
        rank = int(hello["rank"])
        with contextlib.closing(Outlet(connection, hello, self._timeout)) as outlet:
            while True:
                ask = await outlet.asked()
                found, before = await self._round_of(ask), outlet.nbytes
                ready = partial(self._here, found, rank)
                packed = partial(self._packed, found, rank, ask["base"])
                await outlet.send(range(int(ask["first"]), len(found.layout.runs[rank])), self._free, ready, packed)
                self.passed_on += outlet.nbytes - before

    async def _round_of(self, ask: Message) -> _Round:
        await self._news.until(lambda: self._begun >= ask["round"], self._timeout)
        if self._round is None or self._round.number != ask["round"]:
            raise ConnectionError(f"round {ask['round']} is over; read the logs of both receivers")
        return self._round

    async def _here(self, found: _Round, rank: int, number: int) -> None:
        await self._news.until(lambda: found.done[rank] > number or bool(found.problem))
        self._check(found)

    def _check(self, found: _Round) -> None:
        if found.problem:
            raise ConnectionError(f"this receiver has given up: {found.problem}")

    async def _packed(
        self, found: _Round, rank: int, base: int | None, number: int, bucket: Bucket
    ) -> tuple[Message, torch.Tensor]:
        """The message and the bytes of a bucket that is here."""
        self._check(found)  # again: the wait for a free bucket may have been long, and `staging` is another then
        offset, nbytes, pieces = found.layout.runs[rank][number]
        message: Message = {"at": offset, "nbytes": nbytes}
        if (rank, number) in found.changes and base == found.layout.holds:
            message["changes"], data = found.changes[rank, number]
            return message, data
        if found.layout.staging is not None:
            return message, found.layout.staging.part(rank, offset, nbytes)
        if odd := next((one for one in pieces if dtype_named(one.dtype) != self._views[one.want].tensor.dtype), None):
            raise ConnectionError(f"{odd.name}: this receiver has cast it; ask the sender for it")
        source: dict[str, list[Values]] = {}
        for one in pieces:
            source.setdefault(one.name, []).append(self._views[one.want])
        data = bucket.on(self._device, nbytes)
        await asyncio.to_thread(pack, pieces, source, data)
        return message, data

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
        await self._news.until(lambda: all(one.done() for one in found.pulls) or bool(found.problem))
        if not found.problem:
            await self._say({"op": "staged", "round": found.number})
            # Others may be slower. Sender 0 sees to it that they end, and that it lives is seen where it is heard.
            await self._news.until(lambda: found.committed or bool(found.problem))
        return found.committed

    async def _give_up(self, found: _Round) -> None:
        """Leaves a round; what was written in place stays, and is not valid."""
        self._last = f"version {found.version}: {found.problem}"
        # Closed rather than cancelled: a bucket that is being written in a thread must not be written later.
        self._close_inlets(set())
        if found.pulls:
            await asyncio.wait(found.pulls)
        found.layout.staging = None  # a sender that comes late may still write there
        if self._round is found:
            self._round = None
        await self._say({"op": "failed", "round": found.number, "reason": found.problem})

    async def _done(self, taken: _Round) -> None:
        self._round, self._offered = None, False
        taken.layout.holds = None if taken.layout.staging is None else taken.number
        await self._say({"op": "taken", "round": taken.number})
