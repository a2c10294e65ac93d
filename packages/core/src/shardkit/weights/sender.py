"""The sending side, on every trainer rank: packs its pieces and streams them to the receivers."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.weights.boxes import Box, Held, Piece, decode, dtype_named, encode
from shardkit.weights.coordinator import Coordinator
from shardkit.weights.delta import changes
from shardkit.weights.packing import Names, Source, bytes_of, describe, pack
from shardkit.weights.plan import BUCKET, buckets
from shardkit.weights.shared import SharedStaging
from shardkit.weights.wire import Connection, IOThread, Message, call, listen, parse, secret_for, serve

__all__ = ["Report", "Sending", "WeightSender"]

_RETRY = 0.1  # seconds


@dataclass(frozen=True)
class Report:
    """How a version was sent; the same on all senders, except for `nbytes`.

    Attributes:
        version: the version.
        receivers: names of the receivers that have it.
        failed: why others that had joined do not have it, by name; they keep what they had.
        unused: names of tensors that no receiver wants.
        nbytes: bytes of values that this rank has sent.
    """

    version: int
    receivers: tuple[str, ...]
    failed: Mapping[str, str]
    unused: tuple[str, ...]
    nbytes: int


class Sending:
    """A version that is being sent; `WeightSender.send(async_op=True)` returns it."""

    def __init__(self, future: Future[Report]) -> None:
        self._future = future
        self._seen = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> Report:
        """Waits until it has ended. Raises the errors of `WeightSender.send`."""
        self._seen = True
        return self._future.result()

    def finish(self) -> None:
        """Waits until it has ended; raises its error if nobody has seen it."""
        if not self._seen:
            self.wait()
        with contextlib.suppress(Exception):
            self._future.result()


@dataclass
class _Job:
    """A bucket for a receiver."""

    receiver: str
    offset: int
    nbytes: int
    pieces: list[Piece]


class WeightSender:
    """Sends the weights of a sharded model to receivers in other processes; make one on every trainer rank.

    No tensor is gathered: each rank sends boxes of its own shards to the receivers that want them. Extra memory is two
    buckets, and with `async_op` a copy of this rank's shards in host memory, in the dtype that is sent.

    Args:
        model: a model whose parameters are DTensors or plain tensors, sharded by shardkit, by stock FSDP2 or by tensor
            parallelism; or a state dict. It is read at each `send`. Plain tensors count as replicas of all ranks.
        address: "tcp://host:port", a free port of the host of rank 0, which listens there; receivers have the same.
        names: from the name in the state dict to the name that receivers ask for, or to several; None leaves it out.
        dtype: the dtype in which floating-point tensors are sent; None: each in its own. Receivers cast to theirs.
        receivers: how many receivers must have joined before the first version is sent.
        delta: send only the elements that have changed since the version before, with a checksum, to receivers that
            have it; to others, and to those that receive in place, the whole. The result is the same to the last bit.
            Takes two copies of this rank's shards in host memory, in the dtype that is sent, and a third bucket.
        timeout: seconds to wait for a peer: for the other ranks to call `send`, for receivers to call `receive`, and
            for the next bytes of a transfer to move.
        bucket: bytes that are packed and sent at a time.
        rank: this rank; None: that of the default process group, or 0 if there is none.
        world_size: the number of ranks, likewise.

    Raises:
        OSError: on rank 0 if it cannot listen at the address.
        ValueError: if the address is not a TCP address, or on another host without a secret.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        address: str,
        *,
        names: Names = str,
        dtype: torch.dtype | None = None,
        receivers: int = 1,
        delta: bool = False,
        timeout: float = 300.0,
        bucket: int = BUCKET,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        in_group = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if in_group else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size() if in_group else 1
        self._model, self._names, self._dtype, self._timeout, self._bucket = model, names, dtype, timeout, bucket
        self._host, self._port = parse(address)
        self._secret = secret_for(self._host)
        self._delta = delta
        self._before: tuple[str, Source] | None = None  # the version before, and its name
        self._told: list[Held] | None = None
        self._streams: dict[str, list[Piece]] = {}
        self._segments: dict[str, SharedStaging] = {}
        self._buckets: list[_Bucket] = []
        self._control: Connection | None = None
        self._last: Sending | None = None
        self._io = IOThread()
        if self.rank == 0:
            try:
                listener = listen(self._host, self._port)
            except OSError:
                self._io.close()
                raise
            self._coordinator = self._io.run(_make(lambda: Coordinator(self.world_size, receivers, bucket, timeout)))
            self._io.spawn(serve(listener, self._secret, self._coordinator.peer))
            self._io.spawn(self._coordinator.run())

    def send(self, version: int, *, async_op: bool = False) -> Report | Sending:
        """Sends the model as it is now to all receivers that have joined. Collective over the senders.

        It returns when the receivers have the version, or at once with `async_op`, after a copy of this rank's shards:
        training may go on. The version before has been sent then. A receiver that fails is in the report, with a
        warning, and keeps what it had; so does one that is not in `receive()` within the timeout.

        Args:
            version: a number for the receivers, the same on all ranks.
            async_op: return a `Sending` to wait for.

        Raises:
            ConnectionError: if another sender is lost; no receiver has the version then. Once it has been restarted,
                a later call sends to all again.
            RuntimeError: if the senders do not agree, or no receiver joins within the timeout.
            TimeoutError: if sender 0 does not answer.
            TypeError: for a value that is not a dense tensor.
            ValueError: if two tensors get one name.
        """
        if self._last is not None:
            last, self._last = self._last, None
            last.finish()
        held, source = describe(self._model, self._names, self._dtype)
        if async_op or self._delta:
            source = _snapshot(held, source)
        if not async_op:
            return self._send(version, held, source)
        future: Future[Report] = Future()

        def run() -> None:
            try:
                future.set_result(self._send(version, held, source))
            except BaseException as error:  # noqa: BLE001 - raised by wait()
                future.set_exception(error)

        threading.Thread(target=run, name=f"shardkit weights {version}", daemon=True).start()
        self._last = Sending(future)
        return self._last

    def close(self) -> None:
        """Leaves; on rank 0 the receivers are told that nothing more comes. Waits for a version that is being sent."""
        if self._last is not None:
            with contextlib.suppress(Exception):
                self._last.wait()
        with contextlib.suppress(OSError, TimeoutError, RuntimeError):
            self._io.run(self._leave())
        self._io.close()
        self._segments.clear()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one version

    def _send(self, version: int, held: list[Held], source: Source) -> Report:
        try:
            go = self._io.run(self._offer(version, held))
            nbytes, name = 0, ""
            if go["op"] == "go":
                nbytes, failed = self._stream(go, source)
                name = go["id"]
                go = self._io.run(self._sent(failed))
        except BaseException:
            # Not at the same message as the coordinator any more: it learns that from the end of the connection.
            self._io.run(self._drop())
            raise
        if "error" in go:
            error = go["error"]
            if go.get("lost"):
                raise ConnectionError(f"version {version} was not sent: {error}")
            raise RuntimeError(f"version {version} was not sent: {error}")
        if self._delta and name:
            self._before = name, source
        for receiver, reason in go["failed"].items():
            warnings.warn(f"receiver {receiver} does not have version {version}: {reason}", stacklevel=3)
        return Report(version, tuple(go["receivers"]), dict(go["failed"]), tuple(go["unused"]), nbytes)

    async def _offer(self, version: int, held: list[Held]) -> Message:
        """Offers a version; returns the message to go, or the result if nothing is sent."""
        if self._control is None:
            self._control, self._told = await self._join(), None
        told = held if held != self._told else None
        self._told = held
        message = {"op": "offer", "version": version, "held": None if told is None else encode(told)}
        await self._control.send(message)
        return await self._answer("to begin")

    async def _answer(self, awaited: str) -> Message:
        # Sender 0 waits for others itself, first for senders, then for receivers, and says so in time.
        assert self._control is not None
        try:
            async with asyncio.timeout(4 * self._timeout + _RETRY):
                return await self._control.receive()
        except TimeoutError:
            raise TimeoutError(
                f"sender {self.rank} has waited {4 * self._timeout:g} s for sender 0 to say {awaited}; read its log"
            ) from None
        except ConnectionError as error:
            raise ConnectionError(
                f"sender {self.rank} has lost sender 0, which was to say {awaited}: {error}; restart it, then send "
                "again"
            ) from error

    async def _join(self) -> Connection:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                connection = await call(self._host, self._port, self._secret)
                await connection.send({"as": "sender", "rank": self.rank, "world_size": self.world_size})
                return connection
            except (OSError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"sender {self.rank} has not reached sender 0 at {self._host}:{self._port} within "
                        f"{self._timeout:g} s: {error}; check the address, and that rank 0 has a WeightSender"
                    ) from error
                await asyncio.sleep(_RETRY)

    async def _sent(self, failed: dict[str, str]) -> Message:
        assert self._control is not None
        await self._control.send({"op": "sent", "failed": failed})
        return await self._answer("that the receivers have the version")

    async def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control = None

    async def _leave(self) -> None:
        if self.rank == 0:
            await self._coordinator.say_goodbye()
        if self._control is not None:
            await self._control.send({"op": "bye"})

    def _stream(self, go: Message, source: Source) -> tuple[int, dict[str, str]]:
        """Sends this rank's pieces to all receivers; returns bytes, and why it failed, by receiver."""
        for receiver, pieces in go["streams"].items():
            self._streams[receiver] = decode(Piece, pieces)
        self._streams = {one: pieces for one, pieces in self._streams.items() if one in go["joined"]}
        places = {receiver: place for receiver, place in go["receivers"].items() if self._streams[receiver]}
        self._segments = {
            receiver: staging
            for receiver, place in places.items()
            if (staging := SharedStaging.opened(place.get("segment"), self._segments.get(receiver)))
        }
        lanes = {receiver: _Lane(self._io, self._timeout) for receiver in places}
        nbytes = 0
        try:
            for receiver, lane in lanes.items():
                place = {**places[receiver], "id": receiver, "round": go["round"], "rank": self.rank}
                lane.start(self._open(place))
            for job in self._jobs(places):
                lane = lanes[job.receiver]
                if lane.problem:
                    continue
                if job.receiver in self._segments:
                    nbytes += job.nbytes
                    pack(job.pieces, source, self._segments[job.receiver].part(self.rank, job.offset, job.nbytes))
                    lane.put({"at": job.offset, "nbytes": job.nbytes, "shared": True}, None)
                else:
                    bucket = self._free_bucket(source)
                    message: Message = {"at": job.offset, "nbytes": job.nbytes}
                    same = self._before is not None and places[job.receiver]["base"] == self._before[0]
                    changed, data = bucket.fill(job, source, self._before[1] if same and self._before else None)
                    nbytes += len(data)
                    lane.put({**message, **changed}, data, bucket.release)
        finally:
            for lane in lanes.values():
                lane.end()
        return nbytes, {receiver: lane.problem for receiver, lane in lanes.items() if lane.problem}

    def _jobs(self, places: Mapping[str, Any]) -> Iterator[_Job]:
        """One bucket for each receiver in turn. Each sender begins with another one, so that no receiver has all."""
        receivers = deque(sorted(places))
        receivers.rotate(-self.rank)
        waiting = deque((receiver, iter(buckets(self._streams[receiver], self._bucket))) for receiver in receivers)
        while waiting:
            receiver, runs = waiting.popleft()
            if (run := next(runs, None)) is not None:
                yield _Job(receiver, *run)
                waiting.append((receiver, runs))

    async def _open(self, place: Message) -> Connection:
        connection = await call(place["host"], place["port"], self._secret)
        await connection.send({"rank": place["rank"], "receiver": place["id"], "round": place["round"]})
        return connection

    def _free_bucket(self, source: Source) -> _Bucket:
        """One of two buckets; waits until it has been sent."""
        if not self._buckets:
            largest = max((piece.nbytes for pieces in self._streams.values() for piece in pieces), default=1)
            device = next((tensor.device for parts in source.values() for _, tensor in parts), torch.device("cpu"))
            free: queue.SimpleQueue[_Bucket] = queue.SimpleQueue()
            self._buckets = [_Bucket(max(self._bucket, largest), device, free) for _ in range(2)]
            for one in self._buckets:
                one.release()
        return self._buckets[0].free.get()


async def _make(make: Callable[[], Coordinator]) -> Coordinator:
    return make()


class _Bucket:
    """Memory that is filled on the device of the tensors and sent from the host."""

    def __init__(self, nbytes: int, device: torch.device, free: queue.SimpleQueue[_Bucket]) -> None:
        self.free = free
        self._on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._on_device = self._on_host if device.type == "cpu" else on_device

    def fill(self, job: _Job, source: Source, before: Source | None) -> tuple[Message, memoryview]:
        """Packs a job, or what has changed since `before`; the result is valid until `release`."""
        packed = self._on_device[: job.nbytes]
        pack(job.pieces, source, packed)
        host = self._on_host[: job.nbytes]
        if packed.device.type != "cpu":
            host.copy_(packed)  # waits for the device
        if before is not None:
            old = torch.empty_like(host)
            pack(job.pieces, before, old)
            if (found := changes(job.pieces, host, old)) is not None:
                return {"changes": found[0]}, found[1]
        return {}, bytes_of(host)

    def release(self) -> None:
        """May be filled again."""
        self.free.put(self)


class _Lane:
    """Buckets on their way to one receiver, one after the other; after a problem the rest is dropped."""

    def __init__(self, io: IOThread, timeout: float) -> None:
        self.problem = ""
        self._io, self._timeout = io, timeout
        self._queue: asyncio.Queue[tuple[Message, memoryview | None, Callable[[], None]] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self, opening: Any) -> None:
        self._task = self._io.spawn(self._run(opening))

    def put(self, message: Message, data: memoryview | None, then: Callable[[], None] = lambda: None) -> None:
        """Sends a message and data; calls `then` when the data's memory may be written again."""
        self._io.loop.call_soon_threadsafe(self._queue.put_nowait, (message, data, then))

    def end(self) -> None:
        """Waits until all of it has been sent, or failed."""
        if self._task is not None:
            self._io.loop.call_soon_threadsafe(self._queue.put_nowait, None)
            self._io.run(_joined(self._task))

    async def _run(self, opening: Any) -> None:
        connection: Connection | None = None
        try:
            connection = await opening
        except (OSError, TimeoutError) as error:
            self.problem = f"cannot be reached: {error or 'no answer'}"
        while (item := await self._queue.get()) is not None:
            message, data, then = item
            try:
                if connection is not None and not self.problem:
                    async with asyncio.timeout(self._timeout):
                        await connection.send(message, data)
            except TimeoutError:
                self.problem = f"it has read nothing for {self._timeout:g} s"
            except OSError as error:
                self.problem = f"the connection was lost: {error}"
            finally:
                then()
        if connection is not None:
            if not self.problem:
                await self._read_end(connection)
            connection.close()

    async def _read_end(self, connection: Connection) -> None:
        """Waits until the receiver has closed: what is still on the way would be lost if this end closed first."""
        try:
            async with asyncio.timeout(self._timeout):
                await connection.receive()
        except TimeoutError:
            self.problem = f"it has read nothing for {self._timeout:g} s"
        except OSError:
            pass  # closed; it tells sender 0 whether it has all


async def _joined(task: asyncio.Task[None]) -> None:
    await task


@torch.no_grad()
def _snapshot(held: list[Held], source: Source) -> Source:
    """Copies in host memory, in the dtypes that are sent."""
    dtypes = {one.name: dtype_named(one.dtype) for one in held}
    copies: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for name, parts in source.items():
        copies[name] = []
        for box, tensor in parts:
            on_device = tensor.to(dtypes[name])  # cast before it is moved: fewer bytes
            copy = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=on_device.device.type == "cuda")
            copies[name].append((box, copy.copy_(on_device, non_blocking=True)))
    if any(tensor.device.type == "cuda" for parts in source.values() for _, tensor in parts):
        torch.cuda.synchronize()
    return copies
