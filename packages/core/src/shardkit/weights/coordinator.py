"""Brings senders and receivers together; runs beside sender 0. It sees descriptions and versions, never a value.

Note [Rounds]
Peers ask, and wait for the answer. A sender asks to send a version, and is told how it went. A receiver asks for the
next version, and is told to begin; when it has all of its bytes, it asks whether to take them.

A version is sent in a round, which begins when all senders ask for it and all receivers that have joined are in
`receive()`; those that are not, until the timeout, miss it. It ends when each receiver has all of its bytes, is gone or
has failed. If a sender is lost, nobody takes the version; otherwise those that have it take it, all at once.

Nobody waits for a peer that shows no sign of life. Receivers give up a transfer that stalls, so a round has no timeout
as long as bytes move.

Note [Chains]
Receivers that want the same form a chain: the first gets its bytes from the senders, each other one from the one before
it, as they come, so that the work of a sender does not grow with their number. Receivers of one host are neighbours.
Those that have the version before come first, so that changes are passed on as far as somebody can use them. When
nothing more comes from the receiver before it, a receiver gets the rest from the senders.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardkit.weights.boxes import Held, Wanted, decode, encode
from shardkit.weights.plan import Provided, plan
from shardkit.weights.wire import Connection, Message, News


@dataclass(eq=False)
class _Peer:
    """One that has joined; receivers reach it at `place`. `asks` is its question, {} if it has none."""

    place: Message
    connection: Connection
    asks: Message = field(default_factory=dict)


@dataclass(eq=False)
class _Sender(_Peer):
    held: list[Held] = field(default_factory=list)


@dataclass(eq=False)
class _Receiver(_Peer):
    name: str = ""
    wants: tuple[Wanted, ...] = ()
    turn: int = 0  # a number that those that want the same have in common
    layout: Message | None = None  # what it has been told of its plan
    taking: bool = False  # whether it is in the round
    problem: str = ""  # why it does not get the version

    def fails(self, reason: str) -> None:
        """It does not get the version, if it is in the round."""
        if self.taking:
            self.taking, self.problem = False, reason


class Coordinator:
    """Waits until all `world_size` senders ask to send a version and `receivers` have joined, then has it sent; in the
    loop of an `IOThread`.
    """

    def __init__(self, world_size: int, receivers: int, bucket: int, timeout: float) -> None:
        self._world_size, self._least, self._bucket, self._timeout = world_size, receivers, bucket, timeout
        self._senders: dict[int, _Sender] = {}
        self._lost: dict[int, str] = {}  # senders, until those that wait for them have been told
        self._receivers: dict[str, _Receiver] = {}
        self._turns: dict[tuple[Wanted, ...], int] = {}
        self._provided: Provided | None = None
        self._layouts: dict[int, Message] = {}  # by turn
        self._round = time.time_ns()  # numbers that are never used again, not by the next run either
        self._under_way = self._awaits_receivers = False
        self._news = News()

    async def peer(self, connection: Connection) -> None:
        """Serves a peer until it ends."""
        try:
            hello = await connection.hear(self._timeout)
            place = {"id": str(hello["id"]), "host": str(hello["host"]), "port": int(hello["port"])}
            if hello["as"] == "sender":
                await self._serve_sender(_Sender(place, connection), hello)
            else:
                wants = tuple(decode(Wanted, hello["wants"]))
                turn = self._turns.setdefault(wants, len(self._turns))
                receiver = _Receiver(place, connection, name=str(hello["name"]), wants=wants, turn=turn)
                await self._serve_receiver(receiver)
        except (KeyError, TypeError, ValueError) as error:
            await self._say(connection, {"op": "refused", "reason": f"a message without sense: {error!r}"})

    async def run(self) -> None:
        while True:
            await self._news.until(lambda: any(one.asks for one in self._senders.values()))
            try:
                result = await self._send_version()
            except Exception as error:  # noqa: BLE001 - told to those that wait, who raise it
                reason = str(error) if isinstance(error, (ConnectionError, RuntimeError, ValueError)) else repr(error)
                result = {"op": "refused", "reason": reason, "lost": isinstance(error, ConnectionError)}
            self._under_way = self._awaits_receivers = False
            self._lost.clear()
            for one in self._receivers.values():
                one.taking = False
            over = {"op": "over", "reason": result.get("reason", "others have gone on")}
            await self._answer({one: over for one in self._receivers.values() if one.asks.get("op") == "take"})
            await self._answer({one: result for one in self._senders.values() if one.asks})

    async def say_goodbye(self) -> None:
        """Tells receivers that the senders close."""
        await self._answer({one: {"op": "bye"} for one in self._receivers.values()})

    # -- peers

    async def _serve_sender(self, sender: _Sender, hello: Message) -> None:
        rank, seen = int(hello["rank"]), (hello["world_size"], hello["bucket"])
        expected = self._world_size, self._bucket
        if seen != expected or not 0 <= rank < self._world_size:
            reason = (
                f"sender {rank} has (world_size, bucket) = {seen}, sender 0 has {expected}; give all senders the same, "
                "and ranks below world_size"
            )
            await self._say(sender.connection, {"op": "refused", "reason": reason})
            return
        if rank in self._senders:
            self._lose(rank, self._senders[rank], "another process has taken its place")
        self._senders[rank] = sender
        if not self._under_way:
            self._lost.pop(rank, None)
        sender.connection.spawn(sender.connection.beat(lambda: bool(sender.asks)))
        reason = "its process has ended"
        try:
            while (message := await sender.connection.hear(self._timeout))["op"] == "send":
                if message["held"] is not None:
                    sender.held, self._provided = decode(Held, message["held"]), None
                sender.asks = message
                self._news.tell()
            reason = "it was closed"
        except TimeoutError as error:
            reason = str(error)
        finally:
            self._lose(rank, sender, reason)

    def _lose(self, rank: int, sender: _Sender, reason: str) -> None:
        if self._senders.get(rank) is sender:
            del self._senders[rank]
            self._lost[rank] = reason
            self._provided = None
            sender.connection.close()
            self._news.tell()

    async def _serve_receiver(self, receiver: _Receiver) -> None:
        self._receivers[receiver.place["id"]] = receiver
        receiver.connection.spawn(receiver.connection.beat(lambda: bool(receiver.asks)))
        reason = "its process has ended, or receive() was interrupted"
        try:
            while True:
                self._news.tell()
                message = await receiver.connection.hear(self._timeout)
                match message["op"]:
                    case "next":
                        receiver.fails(str(message["problem"]))
                        receiver.asks = message
                    case "take" if receiver.taking:
                        receiver.asks = message
                    case "take":
                        await self._say(receiver.connection, {"op": "over", "reason": "others have gone on"})
                    case "taken":
                        receiver.taking = False
                    case "offered":
                        await self._say(receiver.connection, {"op": "offered", "yes": self._awaits_receivers})
                    case "stop" if receiver.asks:  # else it has been told to begin
                        await self._answer({receiver: {"op": "stopped"}})
        except TimeoutError as error:
            reason = str(error)
        finally:
            if self._receivers.get(receiver.place["id"]) is receiver:
                del self._receivers[receiver.place["id"]]
            receiver.fails(reason)
            self._news.tell()

    # -- rounds

    async def _send_version(self) -> Message:
        """Sends what all ask for; returns what the senders are told."""
        version = await self._agreed()
        self._under_way = self._awaits_receivers = True
        await self._until(self._all_wait, self._timeout)
        self._awaits_receivers = False
        joined = list(self._receivers.values())
        if len(joined) < self._least:
            raise RuntimeError(
                f"{len(joined)} receivers have joined within {self._timeout:g} s, expected at least {self._least}; "
                "start them, or pass receivers= the number to wait for"
            )
        self._least = 0
        if self._provided is None:
            self._provided = Provided({rank: one.held for rank, one in self._senders.items()})
            self._layouts.clear()
        names = set(self._provided.tensors)
        for one in joined:
            if one.turn not in self._layouts:
                self._layouts[one.turn] = await self._layout(self._provided, one)
        self._round += 1
        begin = {"op": "begin", "round": self._round, "version": version, "timeout": self._timeout}
        told: dict[_Receiver, Message] = {}
        for one in joined:  # nothing is awaited from here until all are told: any of them may stop asking
            absent = "" if one.asks else f"it has not called receive() within {self._timeout:g} s"
            one.problem = self._layouts[one.turn].get("refused", absent)
            if one.problem and one.asks:
                told[one] = {"op": "refused", "reason": one.problem}
        taking = [one for one in self._receivers.values() if one in joined and not one.problem]
        for chain in _chains(taking):
            one_host = len({one.place["host"] for one in chain}) == 1
            for before, one in zip([None, *chain], chain, strict=False):
                layout = self._layouts[one.turn]
                told[one] = {**begin, "before": before and before.place, "one_host": one_host}
                told[one]["last"] = one is chain[-1]
                told[one]["layout"] = None if one.layout is layout else layout
                one.layout, one.taking = layout, True
        await self._answer(told)
        await self._until(lambda: all(one.asks or one.problem for one in taking))
        await self._answer({one: {"op": "commit"} for one in taking if not one.problem})
        await self._news.until(lambda: not any(one.taking for one in taking), self._timeout)
        for one in taking:
            one.fails(f"it has not taken the version within {self._timeout:g} s")
        return {
            "op": "sent",
            "receivers": [one.name for one in taking if not one.problem],
            "failed": {one.name: one.problem for one in joined if one.problem},
            "unused": sorted(names - {want.name for one in joined for want in one.wants}),
        }

    async def _agreed(self) -> int:
        """The version for which all senders ask."""

        def versions() -> dict[int, int]:
            return {rank: one.asks["version"] for rank, one in sorted(self._senders.items()) if one.asks}

        await self._until(lambda: len(versions()) == self._world_size, self._timeout)
        asked = versions()
        if len(asked) < self._world_size:
            absent = [rank for rank in range(self._world_size) if rank not in asked]
            raise RuntimeError(
                f"senders {absent} have not called send({next(iter(asked.values()), '')}) within {self._timeout:g} s; "
                "read their logs, and call it on all ranks"
            )
        if len(set(asked.values())) > 1:
            raise RuntimeError(f"senders offer different versions, by rank {asked}; call send() with the same on all")
        return asked[0]

    async def _until(self, condition: Callable[[], bool], within: float | None = None) -> None:
        """Waits until a condition holds, for `within` seconds at most. Raises ConnectionError if a sender is lost."""
        await self._news.until(lambda: bool(self._lost) or condition(), within)
        if self._lost:
            lost = "; ".join(f"sender {rank} is gone: {reason}" for rank, reason in sorted(self._lost.items()))
            raise ConnectionError(f"{lost}; restart it, then send again")

    def _all_wait(self) -> bool:
        return len(self._receivers) >= self._least and all(one.asks for one in self._receivers.values())

    async def _layout(self, provided: Provided, one: _Receiver) -> Message:
        """Who sends what to a receiver, or why it cannot take part."""
        places = {rank: each.place for rank, each in self._senders.items()}
        try:  # in a thread: it may take seconds, and peers must see that this process lives
            pieces = await asyncio.to_thread(plan, provided, one.wants, bucket=self._bucket, turn=one.turn)
        except ValueError as error:
            return {"refused": str(error)}
        return {"bucket": self._bucket, "senders": {at: [places[at], encode(some)] for at, some in pieces.items()}}

    async def _answer(self, answers: Mapping[_Receiver, Message] | Mapping[_Sender, Message]) -> None:
        for peer in answers:
            peer.asks = {}
        await asyncio.gather(*(self._say(peer.connection, message) for peer, message in answers.items()))

    async def _say(self, connection: Connection, message: Message) -> None:
        """Disconnects a peer that does not read; that it is gone is seen where it is served."""
        try:
            async with asyncio.timeout(self._timeout):
                await connection.send(message)
        except (OSError, TimeoutError):
            connection.close()


def _chains(taking: Sequence[_Receiver]) -> list[list[_Receiver]]:
    """In the order in which they pass bytes on; see Note [Chains]."""
    chains: dict[int, list[_Receiver]] = {}
    for one in sorted(taking, key=lambda one: (-(one.asks["base"] or 0), one.place["host"])):
        chains.setdefault(one.turn, []).append(one)
    return list(chains.values())
