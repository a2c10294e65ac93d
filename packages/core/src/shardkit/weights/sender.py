"""The sending side, on every trainer rank: packs its pieces and streams them to the receivers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardkit.weights.boxes import Held, Piece, decode, dtype_named, encode
from shardkit.weights.coordinator import Coordinator
from shardkit.weights.delta import changes
from shardkit.weights.lanes import Lane
from shardkit.weights.packing import Names, Source, Values, describe, pack
from shardkit.weights.plan import BUCKET, buckets
from shardkit.weights.shared import SharedStaging
from shardkit.weights.wire import Closing, Connection, IOThread, Message, call, listen, parse, secret_for, serve

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
        self.seen = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> Report:
        """Waits until it has ended. Raises the errors of `WeightSender.send`."""
        self.seen = True
        return self._future.result()


@dataclass
class _Stream:
    """This rank's pieces for all receivers that want the same.

    Attributes:
        runs: offset, bytes and pieces of each bucket.
        kept: with `delta`, the bytes of the version `name`.
    """

    runs: list[tuple[int, int, list[Piece]]]
    name: int = 0
    kept: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.runs)


class WeightSender(Closing):
    """Sends the weights of a sharded model to receivers in other processes; make one on every trainer rank.

    No tensor is gathered: each rank sends boxes of its own shards to the receivers that want them. Extra memory is two
    buckets, and with `async_op` a copy of this rank's shards in host memory, in the dtype that is sent.

    Args:
        model: a model whose parameters are DTensors or plain tensors, sharded by shardkit, by stock FSDP2 or by tensor
            parallelism; or a state dict. It is read at each `send`. Plain tensors count as replicas of all ranks.
        address: "tcp://host:port", a free port of the host of rank 0, which listens there; receivers have the same.
        names: from the name in the state dict to the name that receivers ask for, or to several; None leaves it out.
        dtype: the dtype in which floating-point tensors are sent; None: each in its own. Receivers cast to theirs.
        merge_adapters: the model has LoRA adapters of peft: send its weights as if those that are active were merged,
            by the names that they have without. Only the factors are gathered, when `send` is called.
        receivers: how many receivers must have joined before the first version is sent.
        delta: send only the elements that have changed since the version before, with a checksum, to receivers that
            have it; to others, and to those that receive in place, the whole. The result is the same to the last bit.
            Takes a copy in host memory of the bytes that this rank sends.
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
        merge_adapters: bool = False,
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
        self._model, self._names, self._dtype, self._timeout = model, names, dtype, timeout
        self._bucket = max(bucket, 16)  # the largest element
        self._host, self._port = parse(address)
        self._secret = secret_for(self._host)
        self._delta, self._merge = delta, merge_adapters
        self._told: list[Held] | None = None
        self._streams: dict[int, _Stream] = {}  # by number of a layout
        self._segments: dict[str, SharedStaging] = {}
        self._buckets: queue.SimpleQueue[_Bucket] | None = None
        self._control: Connection | None = None
        self._last: Sending | None = None
        self._copies: Source = {}  # of `async_op`, whose memory serves again
        self._background = ThreadPoolExecutor(1, "shardkit weights")
        self._io = IOThread()
        if self.rank == 0:
            try:
                listener = listen(self._host, self._port)
            except OSError:
                self._io.close()
                raise
            self._coordinator = Coordinator(self.world_size, receivers, self._bucket, timeout)
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
        last, self._last = self._last, None
        if last is not None and not (last.seen and last.done()):
            last.wait()
        held, source = describe(self._model, self._names, self._dtype, merge=self._merge)
        if not async_op:
            return self._send(version, held, source)
        source = self._copies = _snapshot(held, source, self._copies)
        self._last = Sending(self._background.submit(self._send, version, held, source))
        return self._last

    def close(self) -> None:
        """Leaves; on rank 0 the receivers are told that nothing more comes.

        Waits for a version that is being sent; raises its error if nobody has seen it.
        """
        self._background.shutdown()
        with contextlib.suppress(OSError, TimeoutError, RuntimeError):
            self._io.run(self._leave())
        self._io.close()
        self._segments.clear()
        if self._last is not None and not self._last.seen:
            self._last.wait()

    # -- one version

    def _send(self, version: int, held: list[Held], source: Source) -> Report:
        try:
            answer = self._io.run(self._offer(version, held))
            nbytes = 0
            while answer["op"] == "go":
                sent, failed = self._stream(answer, source)
                nbytes += sent
                message = {"op": "sent", "failed": failed}
                answer = self._io.run(self._ask(message, "that the receivers have the version"))
        except BaseException:
            # Not at the same message as the coordinator any more: it learns that from the end of the connection.
            self._io.run(self._drop())
            self._buckets = None
            raise
        if "error" in answer:
            reason = answer["error"]
            if answer.get("lost"):
                raise ConnectionError(f"version {version} was not sent: {reason}")
            raise RuntimeError(f"version {version} was not sent: {reason}")
        for receiver, reason in answer["failed"].items():
            warnings.warn(f"receiver {receiver} does not have version {version}: {reason}", stacklevel=3)
        return Report(version, tuple(answer["receivers"]), dict(answer["failed"]), tuple(answer["unused"]), nbytes)

    async def _offer(self, version: int, held: list[Held]) -> Message:
        """Offers a version; returns the message to go, or the result if nothing is sent."""
        if self._control is None:
            self._control, self._told = await self._join(), None
            self._control.beat()
        told = None if held == self._told else encode(held)
        self._told = held
        return await self._ask({"op": "offer", "version": version, "held": told}, "to begin")

    async def _ask(self, message: Message, awaited: str) -> Message:
        """Sends a message to sender 0; returns its answer, as long as that takes: it waits for others, but not long."""
        assert self._control is not None
        try:
            await self._control.send(message)
            return await self._control.hear(self._timeout)
        except TimeoutError as error:
            raise TimeoutError(f"sender {self.rank} has waited for sender 0 to say {awaited}: {error}") from None
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

    async def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control = None

    async def _leave(self) -> None:
        if self.rank == 0:
            await self._coordinator.say_goodbye()
        if self._control is not None:
            await self._control.send({"op": "bye"})
        await self._drop()

    def _stream(self, go: Message, source: Source) -> tuple[int, dict[str, str]]:
        """Sends this rank's pieces to the first receiver of each chain; returns bytes, and why it failed, by id."""
        streams = {int(number): decode(Piece, pieces) for number, pieces in go["streams"].items()}
        self._streams |= {number: _Stream(buckets(pieces, self._bucket)) for number, pieces in streams.items()}
        self._streams = {number: one for number, one in self._streams.items() if number in go["layouts"]}
        heads = {int(number): place for number, place in go["heads"].items()}
        heads = {number: place for number, place in heads.items() if self._streams[number].runs}
        opened = {
            one["id"]: SharedStaging.opened(one["segment"], self._segments.get(one["id"])) for one in heads.values()
        }
        self._segments = {one: segment for one, segment in opened.items() if segment is not None}
        lanes = {
            number: Lane(place, self.rank, opened[place["id"]], self._secret, self._timeout)
            for number, place in heads.items()
        }
        tasks = [self._io.spawn(lane.run(go["round"])) for lane in lanes.values()]
        bases = {number: heads[number]["base"] == self._streams[number].name for number in heads}
        for number in heads:
            self._streams[number].name = 0  # until all is kept
        problem = "the sender has failed; read its log"
        try:
            for number, (offset, nbytes, pieces) in self._jobs(heads):
                lane = lanes[number]
                if not lane.problem:
                    self._pack(lane, self._streams[number], bases[number], offset, nbytes, pieces, source)
            for number, lane in lanes.items():
                self._streams[number].name = 0 if lane.problem else go["name"]
            problem = ""
        finally:
            for lane in lanes.values():
                self._io.loop.call_soon_threadsafe(lane.end, problem)
            for task in tasks:
                task.result()
        failed = {heads[number]["id"]: lane.problem for number, lane in lanes.items() if lane.problem}
        return sum(lane.nbytes for lane in lanes.values()), failed

    def _pack(
        self, lane: Lane, stream: _Stream, same: bool, offset: int, nbytes: int, pieces: list[Piece], source: Source
    ) -> None:
        """Puts a bucket on its way, or its changes if the receiver has the `same` version as is kept."""
        message: Message = {"at": offset, "nbytes": nbytes}
        if lane.segment is not None and not self._delta and source[pieces[0].name][0].tensor.device.type == "cpu":
            pack(pieces, source, lane.segment.part(self.rank, offset, nbytes))
            self._io.loop.call_soon_threadsafe(lane.put, message, None, lambda: None)
            return
        bucket = self._free_bucket(source)
        data = bucket.fill(pieces, source, nbytes)
        if self._delta:
            if stream.kept is None:
                stream.kept = torch.empty(stream.nbytes, dtype=torch.uint8)
            kept = stream.kept[offset : offset + nbytes]
            found = changes(pieces, data, kept) if same else None
            kept.copy_(data)
            if found is not None:
                message["changes"], data = found
        self._io.loop.call_soon_threadsafe(lane.put, message, data, bucket.release)

    def _jobs(self, heads: Mapping[int, Message]) -> Iterator[tuple[int, tuple[int, int, list[Piece]]]]:
        """One bucket for each chain in turn. Each sender begins with another one, so that no receiver has all."""
        numbers = sorted(heads)
        begin = self.rank % max(len(numbers), 1)
        streams = [
            [(number, run) for run in self._streams[number].runs] for number in numbers[begin:] + numbers[:begin]
        ]
        return filter(None, itertools.chain.from_iterable(itertools.zip_longest(*streams)))

    def _free_bucket(self, source: Source) -> _Bucket:
        """One of two buckets; waits until it has been sent."""
        if self._buckets is None:
            device = next((one.tensor.device for parts in source.values() for one in parts), torch.device("cpu"))
            self._buckets = queue.SimpleQueue()
            for _ in range(2):
                self._buckets.put(_Bucket(self._bucket, device, self._buckets))
        return self._buckets.get()


class _Bucket:
    """Memory that is filled on the device of the tensors and sent from the host."""

    def __init__(self, nbytes: int, device: torch.device, free: queue.SimpleQueue[_Bucket]) -> None:
        self._free = free
        self._on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._on_device = self._on_host if device.type == "cpu" else on_device

    def fill(self, pieces: list[Piece], source: Source, nbytes: int) -> torch.Tensor:
        """Packs pieces; the result is valid until `release`."""
        packed, host = self._on_device[:nbytes], self._on_host[:nbytes]
        pack(pieces, source, packed)
        if packed.device.type != "cpu":
            host.copy_(packed)  # waits for the device
        return host

    def release(self) -> None:
        """May be filled again."""
        self._free.put(self)


@torch.no_grad()
def _snapshot(held: list[Held], source: Source, before: Source) -> Source:
    """Copies in host memory, in the dtypes that are sent; into those of the version before, where they fit."""
    dtypes = {one.name: dtype_named(one.dtype) for one in held}
    copies: dict[str, list[Values]] = {}
    for name, parts in source.items():
        old = {one.box: one.tensor for one in before.get(name, ())}
        copies[name] = []
        for one in parts:
            on_device = one.of(one.box)
            if on_device.device.type != "cpu":
                on_device = on_device.to(dtypes[name])  # cast before it is moved: fewer bytes
            copy = old.get(one.box)
            if copy is None or copy.dtype != dtypes[name]:
                pinned = on_device.device.type == "cuda"
                copy = torch.empty(on_device.shape, dtype=dtypes[name], pin_memory=pinned)
            copies[name].append(Values(one.box, copy.copy_(on_device, non_blocking=True)))
    if any(one.tensor.device.type == "cuda" for parts in source.values() for one in parts):
        torch.cuda.synchronize()
    return copies
