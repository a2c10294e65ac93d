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

from shardkit.weights import devices
from shardkit.weights.boxes import Piece, decode, encode
from shardkit.weights.delta import apply
from shardkit.weights.packing import Values, pack, unpack
from shardkit.weights.peer import Peer
from shardkit.weights.plan import Runs, buckets
from shardkit.weights.shared import Staging, staging
from shardkit.weights.streams import Bucket, Buckets, Outlet, read
from shardkit.weights.targets import Target
from shardkit.weights.wire import Connection, Message, call

_LOOK = 1.0  # seconds to wait for the answer to `offered`, which takes a moment


class SendersClosed(ConnectionError):
    """The senders have closed; nothing more comes from them.

    Remedy: end, or call `receive` again to wait for others at the same address.
    """


@dataclass
class _Layout:
    """The pieces that each sender sends, told once for all versions until something changes."""

    senders: dict[int, tuple[Message, list[list[Any]]]]  # where each is, and its pieces
    runs: dict[int, Runs]  # these in buckets
    staging: dict[int, Staging] | None = None  # the bytes beside the targets, by sender; None in place
    holds: int | None = None  # the version that `staging` has, by the number of its round


@dataclass
class _Round:
    """A version on its way."""

    number: int
    version: int
    layout: _Layout
    before: Message | None  # the receiver from which this one gets all, if it is not from the senders
    one_host: bool  # whether all receivers of the chain are on one host
    last: bool  # whether no receiver comes after this one
    problem: str = ""
    # Whether a process from which bytes were to come was left; it may still write where they were to go.
    left: bool = False
    # How many buckets of each sender are where they belong; one more when it is known that they are right.
    done: Counter[int] = field(default_factory=Counter)
    # For the receiver after this one, by sender and number of the bucket.
    changes: dict[tuple[int, int], tuple[Message, torch.Tensor]] = field(default_factory=dict)
    pulls: list[asyncio.Task[None]] = field(default_factory=list)


class WeightReceiver(Peer):
    """Receives weights from `WeightSender`s in other processes; make one in every inference process.

    A version is written into the targets when all of its bytes are here and all other receivers have theirs. Until then
    they are kept beside the targets, in host memory of the targets' size. With `in_place` they are written as they
    come, which takes two buckets of memory.

    Args:
        address: "tcp://host:port", as the senders have it. It joins them at once if they are there, otherwise in
            `receive()` or `offered`. They may end, and start again.
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
        super().__init__(address, timeout)
        self._set_targets(targets)
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.version: int | None = None
        self.passed_on = 0  # bytes, to the receiver after this one
        self.valid = not in_place
        self._in_place = in_place
        wants = encode(self._wants)
        self._hello = {"as": "receiver", "id": secrets.token_hex(8), "name": self.name, "wants": wants}
        self._layout: _Layout | None = None
        self._round: _Round | None = None
        self._begun = 0  # the last round
        self._free = Buckets(0)
        self._inlets: dict[tuple[str, int], Connection] = {}  # by process, and the sender whose bytes come
        self._device, self._patience = self._views[0].tensor.device, timeout
        self._waiting = self._closed = False
        self._problem = ""  # of the last version that failed
        self._taking = asyncio.Lock()
        self._looking: asyncio.Task[bool] | None = None  # the question of `offered`
        self._io.spawn(self._join_if_there())

    @property
    def offered(self) -> bool:
        """Whether the senders wait for this receiver with a version that it does not have; False if they do not answer
        within a second. Another thread may ask it, too.
        """
        return self._io.run(self._is_offered())

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
        super().close()
        self._layout = self._round = None

    def _set_targets(self, targets: Sequence[Target]) -> None:
        parts = [part for target in targets for part in target.parts()]
        self._wants = [want for want, _ in parts]
        self._views = [Values(want.box, view) for want, view in parts]

    def _write(self, taken: _Round) -> None:
        for rank, beside in (taken.layout.staging or {}).items():
            for offset, nbytes, pieces in taken.layout.runs[rank]:
                self._unpack(pieces, beside.data[offset : offset + nbytes])

    def _unpack(self, pieces: Sequence[Piece], data: torch.Tensor) -> None:
        device = self._views[pieces[0].want].tensor.device
        unpack(pieces, data.to(device), self._views)
        if device.type == "cuda":  # the data may be overwritten as soon as this returns
            torch.cuda.current_stream(device).synchronize()

    # -- with sender 0; all below runs in the loop

    async def _join_if_there(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            await self._join(0)

    async def _is_offered(self) -> bool:
        if self._control is None and not self._joining.locked():
            self._io.spawn(self._join_if_there())  # which may take seconds
        if self._control is None or self._waiting:
            return False
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        if not (await asyncio.wait([self._looking], timeout=_LOOK))[0]:
            return False  # sender 0 is stopped, or busy; a later call gets its answer
        looked, self._looking = self._looking, None
        return looked is not None and looked.result()

    async def _end(self, looking: asyncio.Task[bool]) -> None:
        self._looking = None
        try:
            await asyncio.wait([looking], timeout=_LOOK)
        finally:
            looking.cancel()

    async def _look(self) -> bool:
        with contextlib.suppress(OSError, TimeoutError):
            answer = await self._ask({"op": "offered"})
            self._closed = answer["op"] == "bye"
            return bool(answer.get("yes"))
        return False

    async def _take(self, within: float) -> _Round:
        async with self._taking:  # a call that was interrupted may still be giving up its version
            if self._round is not None and not self._round.problem:  # the last call was interrupted while it wrote
                return self._round
            if self._round is not None:  # it was interrupted again while it gave up
                await self._give_up(self._round)
            deadline = time.monotonic() + within
            self._waiting = True
            try:
                if self._looking is not None:  # two questions would take each other's answers
                    await self._end(self._looking)
                while (found := await self._complete(await self._next(deadline, within))).problem:
                    self._problem = f"version {found.version}: {found.problem}"
                return found
            finally:
                self._waiting = False

    async def _next(self, deadline: float, within: float) -> Message:
        while True:
            awaited = "sender 0 to listen"
            if self._closed:
                self._closed = False
                self._leave()
                raise SendersClosed(f"the senders at {self._address} have closed")
            try:
                await self._join(deadline - time.monotonic())
                awaited = "the senders to send a version"
                answer = await self._ask_for_next(deadline - time.monotonic())
            except (OSError, TimeoutError) as error:
                self._problem = f"sender 0 at {self._address}: {error or 'no answer'}"
                if time.monotonic() < deadline:
                    continue
                answer = {"op": "stopped"}
            if answer["op"] == "begin":
                return answer
            if answer["op"] == "refused":
                self._leave()  # or senders would wait for the next call
                raise ValueError(str(answer["reason"]))
            if answer["op"] == "stopped":
                last = f"; the last failure: {self._problem}" if self._problem else ""
                raise TimeoutError(
                    f"no version within {within:g} s: waited for {awaited}{last}; read the senders' logs"
                )
            self._closed = answer["op"] == "bye"

    async def _ask_for_next(self, within: float) -> Message:
        base = self._layout.holds if self._layout is not None else None
        question = asyncio.create_task(self._ask({"op": "next", "base": base, "problem": self._problem}))
        try:
            await asyncio.wait([question], timeout=max(within, 0))
            if not question.done() and self._control is not None:
                await self._control.send({"op": "stop"})  # a version that begins now is taken nevertheless
            return await question
        finally:
            question.cancel()

    async def _complete(self, begin: Message) -> _Round:
        """A version that has come; it has a problem if it is not to be taken."""
        found: _Round | None = None
        problem = "receive() was interrupted"
        try:
            found = self._round = self._begin(begin)
            await self._news.until(lambda: all(one.done() for one in found.pulls) or bool(found.problem))
            problem = found.problem or await self._verdict()
            return found
        except BaseException:
            self._leave()  # others wait for this receiver
            raise
        finally:
            if found is not None and problem:
                found.problem = found.problem or problem
                self._news.tell()
                await self._give_up(found)

    async def _verdict(self) -> str:
        """Why not to take what has come, or "". Others may be slower."""
        try:
            answer = await self._ask({"op": "take"})
        except (OSError, TimeoutError) as error:
            return f"sender 0 is gone: {error}"
        return "" if answer["op"] == "commit" else str(answer.get("reason", "the senders have closed"))

    def _begin(self, begin: Message) -> _Round:
        if (told := begin["layout"]) is not None:
            senders = {int(rank): one for rank, one in told["senders"].items()}
            runs = {rank: buckets(decode(Piece, pieces), told["bucket"]) for rank, (_, pieces) in senders.items()}
            self._layout, self._free = _Layout(senders, runs), Buckets(told["bucket"])
            self._close_inlets(set())  # their pieces are others
        assert self._layout is not None
        layout, before = self._layout, begin["before"]
        if not self._in_place and layout.staging is None:
            sizes = {rank: sum(nbytes for _, nbytes, _ in runs) for rank, runs in layout.runs.items()}
            layout.staging = staging(sizes)
        self._patience = min(self._timeout, begin["timeout"])
        self._begun = int(begin["round"])
        found = _Round(self._begun, int(begin["version"]), layout, before, begin["one_host"], begin["last"])
        self._close_inlets({before["id"]} if before else {place["id"] for place, _ in layout.senders.values()})
        found.pulls = [asyncio.create_task(self._pull(found, rank)) for rank, runs in layout.runs.items() if runs]
        for task in found.pulls:
            task.add_done_callback(lambda _: self._news.tell())
        self._news.tell()
        return found

    async def _give_up(self, found: _Round) -> None:
        """Leaves a round; what was written in place stays, and is not valid."""
        # Closed rather than cancelled: a bucket that is being written in a thread must not be written later.
        self._close_inlets(set())
        if found.pulls:
            await asyncio.wait(found.pulls)
        found.layout.staging = found.layout.holds = None  # a sender that comes late may still write there
        self._round = None

    async def _done(self, taken: _Round) -> None:
        self._round, self._problem = None, ""
        if taken.left:
            taken.layout.staging = None
        taken.layout.holds = None if taken.layout.staging is None else taken.number
        with contextlib.suppress(OSError):
            if self._control is not None:
                await self._control.send({"op": "taken"})

    def _close_inlets(self, but: set[str]) -> None:
        """Those to processes that no bytes are to come from any more."""
        for key in [key for key in self._inlets if key[0] not in but]:
            self._inlets.pop(key).close()

    async def _pull(self, found: _Round, rank: int) -> None:
        """Gets the bytes of a sender from it or the receiver before this one; the whole if changes do not fit."""
        layout = found.layout
        sender, pieces = layout.senders[rank]
        ways = [(sender, layout.holds), (sender, None)] if layout.holds else [(sender, None)]
        for place, base in [(found.before, layout.holds), *ways] if found.before else ways:
            key = (place["id"], rank)
            try:
                if key not in self._inlets:
                    hello = {"rank": rank, "pieces": pieces if place is sender else None}
                    inlet = self._inlets[key] = await call(place["host"], place["port"], self._secret)
                    inlet.patience = self._patience
                    await inlet.send({**hello, "device": devices.place_of(self._device)})
                await self._pull_from(self._inlets[key], found, rank, base)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the version is not complete
                problem, found.left = str(error) or repr(error), True
                if key in self._inlets:
                    self._inlets.pop(key).close()
            if found.problem:
                return
        left = sum(nbytes for _, nbytes, _ in layout.runs[rank][found.done[rank] :])
        found.problem = found.problem or f"the bytes of sender {rank} ended with {left} to come: {problem}"

    async def _pull_from(self, inlet: Connection, found: _Round, rank: int, base: int | None) -> None:
        runs, first = found.layout.runs[rank], found.done[rank]
        beside = found.layout.staging[rank] if found.layout.staging is not None else None
        ask = {"round": found.number, "version": found.version, "first": first, "base": base}
        await inlet.send({**ask, "segment": beside and beside.place, "one_host": found.one_host})
        for number in range(first, len(runs)):
            message = await inlet.receive()
            offset, nbytes, pieces = runs[number]
            if (message.get("at"), message.get("nbytes")) != (offset, nbytes):
                raise ConnectionError(f"it sends {message}, expected {nbytes} bytes at {offset}")
            here = beside.data[offset : offset + nbytes] if beside is not None else None
            by_device = message["by"] == "device"
            if here is not None and (changes := message.get("changes")):
                data = torch.empty(min(int(changes["bytes"]), nbytes), dtype=torch.uint8)
                await read(inlet, message, data)
                await asyncio.to_thread(apply, changes, data, pieces, here)
                if not found.last:
                    found.changes[rank, number] = changes, data
            elif here is not None and not by_device:
                await read(inlet, message, here)
            else:
                bucket = await (free := self._free).get()
                try:
                    data = bucket.on(self._device if by_device else torch.device("cpu"), nbytes)
                    await read(inlet, message, data)
                    if here is None:
                        self.valid, self.version = False, None
                        await asyncio.to_thread(self._unpack, pieces, data)
                    else:
                        await asyncio.to_thread(here.copy_, data)
                finally:
                    free.put_nowait(bucket)
            found.done[rank] = number + 1
            self._news.tell()
        await inlet.receive()  # that all are as they were when they were sent
        found.done[rank] = len(runs) + 1
        self._news.tell()

    async def _serve(self, connection: Connection) -> None:
        """Sends the receiver after this one what has come from one sender."""
        hello = await connection.receive()
        rank = int(hello["rank"])
        outlet = Outlet(connection, hello, self._patience)
        while True:
            ask = await outlet.asked()
            if (found := await self._round_of(int(ask["round"]))) is None:
                return  # it is over
            numbers = range(int(ask["first"]), len(found.layout.runs[rank]))
            packed = partial(self._packed, found, rank, ask["base"])
            await outlet.send(numbers, self._free, partial(self._here, found, rank), packed)
            self.passed_on += outlet.nbytes

    async def _round_of(self, number: int) -> _Round | None:
        await self._news.until(lambda: self._begun >= number, self._timeout)
        return self._round if self._round is not None and self._round.number == number else None

    async def _here(self, found: _Round, rank: int, number: int) -> None:
        await self._news.until(lambda: found.done[rank] > number or bool(found.problem))
        if found.problem:
            raise ConnectionError(f"this receiver has given up: {found.problem}")

    async def _packed(
        self, found: _Round, rank: int, base: int | None, number: int, bucket: Bucket
    ) -> tuple[Message, torch.Tensor]:
        # Again: the wait for a free bucket may have been long, and `staging` is another then.
        await self._here(found, rank, number)
        offset, nbytes, pieces = found.layout.runs[rank][number]
        message: Message = {"at": offset, "nbytes": nbytes}
        if (rank, number) in found.changes and base == found.layout.holds:
            message["changes"], data = found.changes[rank, number]
            return message, data
        if found.layout.staging is not None:
            return message, found.layout.staging[rank].data[offset : offset + nbytes]
        if odd := next((one for one in pieces if one.dtype != self._views[one.want].tensor.dtype), None):
            raise ConnectionError(f"{odd.name}: this receiver has cast it; ask the sender for it")
        data = bucket.on(self._device, nbytes)
        await asyncio.to_thread(pack, pieces, [self._views[one.want] for one in pieces], data)
        await self._here(found, rank, number)  # after that the user may write into the targets
        return message, data
