"""Brings senders and receivers together; runs beside sender 0. It sees descriptions and versions, never a value.

Note [Rounds]
A version is sent in a round. It begins when all senders offer the version and all receivers that have joined are in
`receive()`; those that are not, until the timeout, miss it. Senders then stream to the receivers, and each receiver
says that it has all of its bytes, or why not. If a sender is lost, no receiver takes the version. Otherwise those that
have it are told to take it, all at once; one that failed keeps what it had, and the others do not suffer.

Senders and receivers watch the progress of their own transfers and report one that stalls, so a round has no timeout as
long as bytes move.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardkit.weights.boxes import Held, Piece, Wanted, decode, encode
from shardkit.weights.plan import Provided, plan
from shardkit.weights.wire import Connection, Message

__all__ = ["Coordinator"]

_HELLO_WITHIN = 30.0  # seconds


@dataclass
class _Sender:
    """A sender that has joined."""

    rank: int
    connection: Connection
    held: list[Held] | None = None
    offered: int | None = None
    sent: Message | None = None
    streams: set[str] = field(default_factory=set)  # receivers whose pieces it has been told


@dataclass
class _Receiver:
    """A receiver that has joined; `state` is "joined", "ready", "receiving", "staged" or "gone"."""

    id: str
    name: str
    number: int
    connection: Connection
    place: Message
    wants: list[Wanted]
    state: str = "joined"
    ready: Message = field(default_factory=dict)
    pieces: dict[int, list[Piece]] | None = None
    layout: int = 0
    taken: int = 0  # the round whose version it has taken
    problem: str = ""  # why it misses the version
    refused: str = ""  # why there is no plan for it

    @property
    def takes_part(self) -> bool:
        return self.state == "ready" and not self.refused and self.pieces is not None


class Coordinator:
    """All methods run in the loop of an `IOThread`.

    Args:
        world_size: the number of senders.
        receivers: how many must have joined before the first version is sent.
        bucket: bytes that are sent at a time.
        timeout: seconds to wait for a peer.
    """

    def __init__(self, world_size: int, receivers: int, bucket: int, timeout: float) -> None:
        self._world_size, self._least, self._bucket, self._timeout = world_size, receivers, bucket, timeout
        self._senders: dict[int, _Sender] = {}
        self._lost: dict[int, str] = {}
        self._receivers: dict[str, _Receiver] = {}
        self._provided: Provided | None = None
        self._run = secrets.token_hex(4)  # versions of another run with the same number are others
        self._round = self._layouts = self._joined = 0
        self._changed = asyncio.Event()

    async def peer(self, connection: Connection) -> None:
        """Serves a peer until it ends."""
        async with asyncio.timeout(_HELLO_WITHIN):
            hello = await connection.receive()
        try:
            if hello.get("as") == "sender":
                await self._serve_sender(connection, int(hello["rank"]), int(hello["world_size"]))
            else:
                wants = decode(Wanted, hello["wants"])
                place = {"host": str(hello["host"]), "port": int(hello["port"])}
                self._joined += 1
                receiver = _Receiver(str(hello["id"]), str(hello["name"]), self._joined - 1, connection, place, wants)
                await self._serve_receiver(receiver)
        except (KeyError, TypeError, ValueError) as error:
            await self._say(connection, {"op": "refused", "reason": f"a message without sense: {error!r}"})

    async def run(self) -> None:
        """Sends version after version, until cancelled."""
        while True:
            await self._until(lambda: any(one.offered is not None for one in self._senders.values()), None)
            result = await self._send_version()
            offering = [one for one in self._senders.values() if one.offered is not None]
            for one in offering:
                one.offered = one.sent = None
            await self._broadcast([(one.connection, {"op": "over"}) for one in self._receivers.values()])
            await self._broadcast([(one.connection, {"op": "result", **result}) for one in offering])

    # -- peers

    async def _serve_sender(self, connection: Connection, rank: int, world_size: int) -> None:
        if world_size != self._world_size or not 0 <= rank < world_size:
            reason = f"sender {rank} of {world_size} does not belong to the {self._world_size} senders of sender 0"
            await self._say(connection, {"op": "refused", "reason": reason})
            return
        if rank in self._senders:
            self._senders[rank].connection.close()
        sender = self._senders[rank] = _Sender(rank, connection)
        self._lost.pop(rank, None)
        reason = "its process has ended"
        try:
            while True:
                message = await connection.receive()
                if message["op"] == "offer":
                    if message["held"] is not None:
                        sender.held, self._provided = decode(Held, message["held"]), None
                    sender.offered = int(message["version"])
                elif message["op"] == "sent":
                    sender.sent = message
                elif message["op"] == "bye":
                    reason = "it was closed"
                    return
                self._tell()
        finally:
            if self._senders.get(rank) is sender:
                del self._senders[rank]
                self._lost[rank] = reason
                self._provided = None
                self._tell()

    async def _serve_receiver(self, receiver: _Receiver) -> None:
        self._receivers[receiver.id] = receiver
        self._tell()
        try:
            if self._provided is not None:
                await self._tell_layouts()
            while True:
                message = await receiver.connection.receive()
                if message["op"] == "ready" and message["layout"] == receiver.layout:
                    receiver.state, receiver.ready = "ready", message
                elif message["op"] == "staged" and message["round"] == self._round:
                    receiver.state = "staged"
                elif message["op"] == "done":
                    receiver.state, receiver.taken = "joined", message["round"]
                elif message["op"] == "failed" and message["round"] == self._round:
                    receiver.state, receiver.problem = "joined", str(message["reason"])
                self._tell()
        finally:
            self._receivers.pop(receiver.id, None)
            if receiver.taken != self._round:
                receiver.problem = receiver.problem or "its process has ended"
            receiver.state = "gone"
            self._tell()

    # -- rounds

    async def _send_version(self) -> Message:
        """One round; returns what the senders are told."""
        problem = await self._await_offers()
        if problem:
            return {"error": problem, "lost": bool(self._lost)}
        version = next(iter(self._senders.values())).offered
        try:
            await self._tell_layouts()
        except ValueError as error:
            return {"error": str(error)}
        await self._broadcast([(one.connection, {"op": "offered"}) for one in self._receivers.values()])
        # Those that join while a round runs wait for the next.
        await self._until(self._all_ready, self._timeout)
        joined = list(self._receivers.values())
        if len(joined) < self._least:
            return {
                "error": f"{len(joined)} receivers have joined within {self._timeout:g} s, expected at least "
                f"{self._least}; start them, or pass receivers= the number to wait for",
            }
        self._least = 0
        taking = [one for one in joined if one.takes_part]
        missing = {
            one.name: one.refused or f"it has not called receive() within {self._timeout:g} s"
            for one in joined
            if one not in taking
        }
        problem = await self._transfer(taking, version)
        failed = missing | {one.name: one.problem for one in taking if one.problem}
        for one in taking:
            if one.state in ("receiving", "staged"):
                one.state = "joined"
        if problem:
            return {"error": problem, "lost": True}
        took = [one.name for one in taking if not one.problem]
        return {"version": version, "receivers": took, "failed": failed, "unused": self._unused()}

    async def _await_offers(self) -> str:
        """Waits until all senders offer; returns what is wrong, or ""."""

        def all_offer() -> bool:
            return len(self._senders) == self._world_size and all(
                one.offered is not None for one in self._senders.values()
            )

        in_time = await self._until(lambda: all_offer() or bool(self._lost), self._timeout)
        versions = {rank: one.offered for rank, one in sorted(self._senders.items()) if one.offered is not None}
        if self._lost:
            return self._losses()
        if not in_time:
            absent = [rank for rank in range(self._world_size) if rank not in versions]
            version = next(iter(versions.values()), None)
            return (
                f"senders {absent} have not called send({version}) within {self._timeout:g} s; read their logs, and "
                "call it on all ranks"
            )
        if len(set(versions.values())) > 1:
            return f"senders offer different versions, by rank {versions}; call send() with the same on all ranks"
        return ""

    def _losses(self) -> str:
        return (
            "; ".join(f"sender {rank} is gone: {reason}" for rank, reason in sorted(self._lost.items()))
            + "; restart it, then send again"
        )

    def _all_ready(self) -> bool:
        return (
            len(self._receivers) >= self._least
            and all(one.takes_part or one.refused for one in self._receivers.values())
        ) or bool(self._lost)

    async def _transfer(self, taking: Sequence[_Receiver], version: int | None) -> str:
        """Has the senders send and the receivers receive; returns why nobody has the version, or ""."""
        if self._lost:
            return self._losses()
        if not taking:
            return ""
        self._round += 1
        common = {"round": self._round, "version": version, "id": f"{self._run}:{self._round}"}
        for one in taking:
            one.state, one.problem = "receiving", ""
        for sender in self._senders.values():
            sender.sent = None
        said: list[tuple[Connection, Message]] = [(one.connection, {"op": "begin", **common}) for one in taking]
        said += [(one.connection, self._go(one, taking, common)) for one in self._senders.values()]
        await self._broadcast(said)

        def senders_ended() -> bool:
            return all(one.sent is not None for one in self._senders.values())

        def receivers_ended() -> bool:
            return all(one.state != "receiving" or self._reported(one) for one in taking)

        await self._until(lambda: bool(self._lost) or senders_ended() or receivers_ended(), None)
        await self._until(lambda: bool(self._lost) or (senders_ended() and receivers_ended()), self._timeout)
        late = [rank for rank, one in self._senders.items() if one.sent is None and rank not in self._lost]
        problem = self._losses() if self._lost else ""
        if late and not problem:
            problem = f"senders {late} have not ended sending within {self._timeout:g} s; read their logs"
        await self._conclude(taking, problem)
        return problem

    async def _conclude(self, taking: Sequence[_Receiver], problem: str) -> None:
        """Tells each receiver to take the version, or not to."""
        said: list[tuple[Connection, Message]] = []
        for one in taking:
            reason = problem or one.problem or self._reported(one)
            if one.state == "receiving" and not reason:
                reason = f"it has not received all within {self._timeout:g} s"
            one.problem = reason
            if one.state == "staged" and not reason:
                said.append((one.connection, {"op": "commit", "round": self._round}))
            else:
                said.append((one.connection, {"op": "abort", "round": self._round, "reason": reason}))
        await self._broadcast(said)
        await self._until(lambda: all(one.problem or one.taken == self._round for one in taking), self._timeout)
        for one in taking:
            if not one.problem and one.taken != self._round:
                one.problem = f"it has not taken the version within {self._timeout:g} s"

    def _reported(self, receiver: _Receiver) -> str:
        """Why a sender could not send to a receiver; "" if all could so far."""
        for rank, one in self._senders.items():
            reason = (one.sent or {}).get("failed", {}).get(receiver.id)
            if reason:
                return f"sender {rank}: {reason}"
        return ""

    def _go(self, sender: _Sender, taking: Sequence[_Receiver], common: Message) -> Message:
        streams: Message = {}
        for one in taking:
            if one.pieces is not None and f"{one.id}/{one.layout}" not in sender.streams:
                sender.streams.add(f"{one.id}/{one.layout}")
                streams[one.id] = encode(one.pieces.get(sender.rank, []))
        places = {one.id: {**one.place, "name": one.name, **one.ready} for one in taking}
        return {"op": "go", **common, "receivers": places, "streams": streams, "joined": list(self._receivers)}

    # -- plans

    async def _tell_layouts(self) -> None:
        """Plans for receivers that have no plan, or for all if what senders hold has changed."""
        if self._provided is None:
            self._provided = Provided({rank: one.held or [] for rank, one in self._senders.items()})
            for receiver in self._receivers.values():
                receiver.pieces = None
        said: list[tuple[Connection, Message]] = []
        for receiver in list(self._receivers.values()):
            if receiver.pieces is not None:
                continue
            try:
                receiver.pieces = plan(self._provided, receiver.wants, bucket=self._bucket, turn=receiver.number)
            except ValueError as error:
                receiver.refused = str(error)
                said.append((receiver.connection, {"op": "refused", "reason": receiver.refused}))
                continue
            self._layouts += 1
            receiver.layout, receiver.refused, receiver.state = self._layouts, "", "joined"
            senders = {str(rank): encode(pieces) for rank, pieces in receiver.pieces.items()}
            message = {"op": "layout", "number": receiver.layout, "bucket": self._bucket, "senders": senders}
            said.append((receiver.connection, message))
        await self._broadcast(said)

    def _unused(self) -> list[str]:
        wanted = {want.name for one in self._receivers.values() for want in one.wants}
        return sorted(set(self._provided.tensors if self._provided else ()) - wanted)

    async def say_goodbye(self) -> None:
        """Tells receivers that the senders close."""
        await self._broadcast([(one.connection, {"op": "bye"}) for one in self._receivers.values()])

    # -- waiting and telling

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool], within: float | None) -> bool:
        """Waits until a condition holds; returns whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not condition():
                    await self._changed.wait()
        return condition()

    async def _broadcast(self, said: Sequence[tuple[Connection, Message]]) -> None:
        await asyncio.gather(*(self._say(connection, message) for connection, message in said))

    async def _say(self, connection: Connection, message: Message) -> None:
        """Sends a message. A peer that does not read is disconnected; that it is gone is seen where it is served."""
        try:
            async with asyncio.timeout(self._timeout):
                await connection.send(message)
        except (OSError, TimeoutError):
            connection.close()
