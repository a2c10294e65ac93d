"""Brings senders and receivers together; runs beside sender 0. It sees descriptions and versions, never a value.

Note [Rounds]
A version is sent in a round. It begins when all senders offer the version and all receivers that have joined are in
`receive()`; those that are not, until the timeout, miss it. The receivers then get the bytes from the senders, and each
of them says that it has all of its bytes, or why not. If a sender is lost, no receiver takes the version. Otherwise
those that have it are told to take it, all at once; one that failed keeps what it had.

Nobody waits for a peer that is stopped: control connections carry signs of life. Receivers watch the progress of their
own transfers and report one that stalls, so a round has no timeout as long as bytes move.

Note [Chains]
Receivers that want the same form a chain. The first gets its bytes from the senders, and each other one from the one
before it, as they come, so that the work of a sender does not grow with their number. Receivers of one host are
neighbours. Those that have the version before come first, so that changes can be passed on as far as somebody can use
them. When a receiver is lost, the others are told, and the one after it gets the rest from the senders.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardkit.weights.boxes import Held, Piece, Wanted, decode, encode
from shardkit.weights.plan import Provided, plan
from shardkit.weights.wire import Connection, Message, News

__all__ = ["Coordinator"]


@dataclass
class _Sender:
    """A sender that has joined; receivers reach it at `place`."""

    place: Message
    connection: Connection
    held: list[Held] = field(default_factory=list)
    offered: int | None = None


@dataclass
class _Group:
    """Receivers that want the same; see Note [Chains]."""

    wants: tuple[Wanted, ...]
    turn: int
    provided: Provided | None = None  # for which its plan is
    layout: int = 0  # the number of its plan
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    refused: str = ""  # why there can be none


@dataclass(eq=False)
class _Receiver:
    """A receiver that has joined; `state` is "joined", "ready", "receiving", "staged" or "gone"."""

    name: str
    place: Message
    group: _Group
    connection: Connection
    state: str = "joined"
    base: int | None = None  # the version that it has, by the number of its round
    layout: int = 0  # that it has been told
    taken: int = 0  # the round whose version it has taken
    problem: str = ""  # why it misses the version
    refuses: str = ""  # why it cannot take what its plan has

    @property
    def takes_part(self) -> bool:
        fits = self.layout == self.group.layout and not (self.group.refused or self.refuses)
        return fits and self.state == "ready"


class Coordinator:
    """Waits until all `world_size` senders offer a version and `receivers` have joined, then has it sent.

    All methods but `__init__` run in the loop of an `IOThread`.
    """

    def __init__(self, world_size: int, receivers: int, bucket: int, timeout: float) -> None:
        self._world_size, self._least, self._bucket, self._timeout = world_size, receivers, bucket, timeout
        self._senders: dict[int, _Sender] = {}
        self._lost: dict[int, str] = {}  # senders, until those that wait for them have been told
        self._receivers: dict[str, _Receiver] = {}
        self._groups: dict[tuple[Wanted, ...], _Group] = {}
        self._provided: Provided | None = None
        self._planning = asyncio.Lock()
        # Numbers of rounds and layouts are never used again, not by the next run either.
        self._round = self._layouts = time.time_ns()
        self._under_way = self._awaits_receivers = False
        self._news = News()

    async def peer(self, connection: Connection) -> None:
        """Serves a peer until it ends."""
        connection.beat()
        try:
            hello = await connection.hear(self._timeout)
            place = {"id": str(hello["id"]), "host": str(hello["host"]), "port": int(hello["port"])}
            if hello["as"] == "sender":
                await self._serve_sender(_Sender(place, connection), int(hello["rank"]), int(hello["world_size"]))
            else:
                wants = tuple(decode(Wanted, hello["wants"]))
                group = self._groups.setdefault(wants, _Group(wants, len(self._groups)))
                await self._serve_receiver(_Receiver(str(hello["name"]), place, group, connection))
        except (KeyError, TypeError, ValueError) as error:
            await self._say(connection, {"op": "refused", "reason": f"a message without sense: {error!r}"})

    async def run(self) -> None:
        """Sends version after version, until cancelled."""
        while True:
            await self._news.until(lambda: any(one.offered is not None for one in self._senders.values()))
            try:
                result = await self._send_version()
            except Exception as error:  # noqa: BLE001 - told to those that wait, who raise it
                result = {"error": str(error) if isinstance(error, ValueError) else repr(error)}
            self._under_way = False
            self._lost.clear()
            offering = [one for one in self._senders.values() if one.offered is not None]
            for one in offering:
                one.offered = None
            await self._tell_receivers({"op": "over"})
            await self._broadcast([(one.connection, {"op": "result", **result}) for one in offering])

    async def say_goodbye(self) -> None:
        """Tells receivers that the senders close."""
        await self._tell_receivers({"op": "bye"})

    # -- peers

    async def _serve_sender(self, sender: _Sender, rank: int, world_size: int) -> None:
        if world_size != self._world_size or not 0 <= rank < world_size:
            reason = f"sender {rank} of {world_size} does not belong to the {self._world_size} senders of sender 0"
            await self._say(sender.connection, {"op": "result", "error": f"{reason}; give all the same world_size"})
            return
        if rank in self._senders:
            self._lose(rank, self._senders[rank], "another process has taken its place")
        self._senders[rank] = sender
        if not self._under_way:
            self._lost.pop(rank, None)
        reason = "its process has ended"
        try:
            while (message := await sender.connection.hear(self._timeout))["op"] == "offer":
                if message["held"] is not None:
                    sender.held, self._provided = decode(Held, message["held"]), None
                sender.offered = int(message["version"])
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
        self._news.tell()
        reason = "its process has ended"
        try:
            if self._provided is not None:
                await self._plan()
            if self._awaits_receivers:
                await self._say(receiver.connection, {"op": "offered"})
            while True:
                message = await receiver.connection.hear(self._timeout)
                op, here = message["op"], message.get("round") == self._round
                if op == "ready" and message["layout"] == receiver.layout:
                    receiver.state, receiver.base = "ready", message["base"]
                elif op == "refuses" and message["layout"] == receiver.layout:
                    receiver.refuses = str(message["reason"])
                elif op == "staged" and here:
                    receiver.state = "staged"
                elif op == "taken" and here:
                    receiver.state, receiver.taken = "joined", self._round
                elif op == "failed" and here:
                    receiver.state, receiver.problem = "joined", receiver.problem or str(message["reason"])
                self._news.tell()
        except TimeoutError as error:
            reason = str(error)
        finally:
            if self._receivers.get(receiver.place["id"]) is receiver:
                del self._receivers[receiver.place["id"]]
            if receiver.taken != self._round:
                receiver.problem = receiver.problem or reason
            receiver.state = "gone"
            self._news.tell()
            await self._tell_receivers({"op": "lost", "id": receiver.place["id"]})

    # -- rounds

    async def _send_version(self) -> Message:
        """Sends what all offer; returns what the senders are told."""
        if problem := await self._await_offers():
            return {"error": problem, "lost": bool(self._lost)}
        self._under_way = True
        version = self._senders[0].offered
        if self._provided is None:
            self._provided = Provided({rank: one.held for rank, one in self._senders.items()})
        await self._plan()
        await self._tell_receivers({"op": "offered"})
        # Those that join while a round runs wait for the next.
        self._awaits_receivers = True
        await self._news.until(self._all_ready, self._timeout)
        self._awaits_receivers = False
        joined = list(self._receivers.values())
        if self._lost:
            return {"error": self._losses(), "lost": True}
        if len(joined) < self._least:
            return {
                "error": f"{len(joined)} receivers have joined within {self._timeout:g} s, expected at least "
                f"{self._least}; start them, or pass receivers= the number to wait for",
            }
        self._least = 0
        taking = [one for one in joined if one.takes_part]
        for one in joined:
            absent = one.group.refused or one.refuses or f"it has not called receive() within {self._timeout:g} s"
            one.problem = "" if one in taking else absent
        wanted = {want.name for one in joined for want in one.group.wants}
        unused = sorted(set(self._provided.tensors) - wanted)
        if taking and (problem := await self._transfer(taking, version)):
            return {"error": problem, "lost": True}
        took = [one.name for one in joined if not one.problem]
        failed = {one.name: one.problem for one in joined if one.problem}
        return {"version": version, "receivers": took, "failed": failed, "unused": unused}

    async def _await_offers(self) -> str:
        """Waits until all senders offer; returns what is wrong, or ""."""

        def offered() -> dict[int, int]:
            return {rank: one.offered for rank, one in sorted(self._senders.items()) if one.offered is not None}

        await self._news.until(lambda: len(offered()) == self._world_size or bool(self._lost), self._timeout)
        versions = offered()
        if self._lost:
            return self._losses()
        if len(versions) < self._world_size:
            absent = [rank for rank in range(self._world_size) if rank not in versions]
            return (
                f"senders {absent} have not called send({next(iter(versions.values()), '')}) within "
                f"{self._timeout:g} s; read their logs, and call it on all ranks"
            )
        if len(set(versions.values())) > 1:
            return f"senders offer different versions, by rank {versions}; call send() with the same on all ranks"
        return ""

    def _losses(self) -> str:
        lost = (f"sender {rank} is gone: {reason}" for rank, reason in sorted(self._lost.items()))
        return "; ".join(lost) + "; restart it, then send again"

    def _all_ready(self) -> bool:
        ready = all(one.takes_part or one.group.refused or one.refuses for one in self._receivers.values())
        return (ready and len(self._receivers) >= self._least) or bool(self._lost)

    async def _transfer(self, taking: Sequence[_Receiver], version: int | None) -> str:
        """One round: receivers get the version and take it; returns why nobody does, or ""."""
        self._round += 1
        for receiver in taking:
            receiver.state = "receiving"
        begin = {"op": "begin", "round": self._round, "version": version}
        said: list[tuple[Connection, Message]] = []
        for chain in _chains(taking):
            for number, one in enumerate(chain):
                said.append((one.connection, {**begin, "before": chain[number - 1].place if number else None}))
        await self._broadcast(said)
        await self._news.until(
            lambda: bool(self._lost) or all(one.state != "receiving" or one.problem for one in taking)
        )
        lost = self._losses() if self._lost else ""
        said = []
        for one in taking:
            one.problem = lost or one.problem
            verdict = {"op": "abort", "reason": one.problem} if one.problem else {"op": "commit"}
            said.append((one.connection, {**verdict, "round": self._round}))
        await self._broadcast(said)
        await self._news.until(lambda: all(one.problem or one.taken == self._round for one in taking), self._timeout)
        for one in taking:
            if not one.problem and one.taken != self._round:
                one.problem = f"it has not taken the version within {self._timeout:g} s"
        return lost

    # -- plans

    async def _plan(self) -> None:
        """Plans for groups whose plan is not for the tensors that senders hold now, and tells their receivers."""
        async with self._planning:
            if (provided := self._provided) is None:
                return
            said: list[tuple[Connection, Message]] = []
            for group in {one.group.turn: one.group for one in self._receivers.values()}.values():
                if group.provided is provided:
                    continue
                pieces, refused = {}, ""
                try:  # in a thread: it may take seconds, and peers must see that this process lives
                    pieces = await asyncio.to_thread(plan, provided, group.wants, bucket=self._bucket, turn=group.turn)
                except ValueError as error:
                    refused = str(error)
                self._layouts += 1
                group.provided, group.pieces, group.refused, group.layout = provided, pieces, refused, self._layouts
            places = {rank: one.place for rank, one in self._senders.items()}
            for one in self._receivers.values():
                if one.layout == one.group.layout:
                    continue
                one.layout, one.state, one.refuses = one.group.layout, "joined", ""
                message: Message = {"op": "refused", "reason": one.group.refused}
                if not one.group.refused:
                    senders = {rank: [places.get(rank), encode(pieces)] for rank, pieces in one.group.pieces.items()}
                    message = {"op": "layout", "number": one.layout, "bucket": self._bucket, "senders": senders}
                said.append((one.connection, message))
            await self._broadcast(said)

    # -- telling

    async def _tell_receivers(self, message: Message) -> None:
        await self._broadcast([(one.connection, message) for one in self._receivers.values()])

    async def _broadcast(self, said: Sequence[tuple[Connection, Message]]) -> None:
        await asyncio.gather(*(self._say(connection, message) for connection, message in said))

    async def _say(self, connection: Connection, message: Message) -> None:
        """Sends a message. A peer that does not read is disconnected; that it is gone is seen where it is served."""
        try:
            async with asyncio.timeout(self._timeout):
                await connection.send(message)
        except (OSError, TimeoutError):
            connection.close()


def _chains(taking: Sequence[_Receiver]) -> list[list[_Receiver]]:
    """Receivers of the same bytes in the order in which they pass them on; see Note [Chains]."""
    chains: dict[int, list[_Receiver]] = {}
    for one in sorted(taking, key=lambda one: (-(one.base or 0), one.place["host"])):
        chains.setdefault(one.layout, []).append(one)
    return list(chains.values())
