"""The sending side, on every trainer rank: packs its pieces and streams them to the receivers."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from shardkit.weights.boxes import Held, Piece, decode, encode, is_castable
from shardkit.weights.coordinator import Coordinator
from shardkit.weights.delta import Changed, changes, update
from shardkit.weights.packing import Names, Source, Values, describe, holding, pack
from shardkit.weights.peer import Peer
from shardkit.weights.plan import BUCKET, Runs, buckets
from shardkit.weights.streams import Bucket, Buckets, Outlet
from shardkit.weights.wire import Connection, Message, listen, serve


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


class WeightSender(Peer):
    """Sends the weights of a sharded model to receivers in other processes; make one on every trainer rank.

    No tensor is gathered: each rank sends boxes of its own shards to the receivers that want them. Extra memory is two
    buckets, and with `async_op` or `delta` a copy of this rank's shards in host memory, in the dtype that is sent.

    Args:
        model: a model whose parameters are DTensors or plain tensors, sharded by shardkit, by stock FSDP2 or by tensor
            parallelism; or a state dict. It is read at each `send`. Plain tensors count as replicas of all ranks.
        address: "tcp://host:port", a free port of the host of rank 0, which listens there; receivers have the same.
        names: from the name in the state dict to the name that receivers ask for, or to several; None leaves it out.
        dtype: the dtype in which floating-point tensors are sent, but those of float8, which need a scale; None: each
            in its own. Receivers cast to theirs.
        merge_adapters: the model has LoRA adapters of peft: send its weights as if those that are active were merged,
            by the names that they have without. Only the factors are gathered, when `send` is called.
        receivers: how many receivers must have joined before the first version is sent.
        delta: send only the elements that have changed since the version before, with a checksum, to receivers that
            have it; to others, to those that receive in place, and through shared memory, where that is faster, the
            whole. The result is the same to the last bit.
        timeout: seconds to wait for a peer: for the other ranks to call `send`, for receivers to call `receive`, and
            for the next bytes of a transfer to move.
        bucket: bytes that are packed and sent at a time.
        rank: this rank; None: that of the default process group, or 0 if there is none.
        world_size: the number of ranks, likewise.

    Raises:
        OSError: on rank 0 if it cannot listen at the address.
        ValueError: if the address is not a TCP address, or on another host without a secret; if `dtype` is an integer
            dtype, or one of float8.
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
        if dtype is not None and not is_castable(dtype):
            raise ValueError(
                f"dtype={dtype} would change values, which need a scale for it; pass a wider floating dtype"
            )
        super().__init__(address, timeout)
        in_group = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if in_group else 0
        world_size = world_size if world_size is not None else dist.get_world_size() if in_group else 1
        self._model, self._names, self._dtype = model, names, dtype
        self._bucket = max(bucket, 16)  # the largest element
        self._hello = {"as": "sender", "id": f"sender {self.rank}", "rank": self.rank}
        self._hello |= {"world_size": world_size, "bucket": self._bucket}
        self._delta, self._merge = delta, merge_adapters
        self._told: list[Held] | None = None
        self._serving: _Version | None = None
        self._free = Buckets(self._bucket)
        self._last: Sending | None = None
        self._copies: Source = {}  # of `async_op` or `delta`, whose memory serves again
        self._round = 0  # in which they were sent; 0: in none
        self._compares = False  # whether a receiver of them can use changes
        self._background = ThreadPoolExecutor(1, "shardkit weights")
        if self.rank == 0:
            try:
                listener = listen(self._host, self._port)
            except OSError:
                self._io.close()
                raise
            self._coordinator = Coordinator(world_size, receivers, self._bucket, timeout)
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
            ConnectionError: if another sender is lost; no receiver has the version then. If receivers see that first,
                all of them are in `failed` of the report instead. Once it has restarted, a later call sends to all.
            RuntimeError: if the senders do not agree, or no receiver joins within the timeout.
            TimeoutError: if sender 0 cannot be reached.
            TypeError: for a value that is not a dense tensor.
            ValueError: if two tensors get one name.
        """
        last, self._last = self._last, None
        if last is not None and not (last.seen and last.done()):
            last.wait()
        held, source = describe(self._model, self._names, self._dtype, merge=self._merge)
        if any(one.tensor.is_cuda for parts in source.values() for one in parts):
            torch.cuda.synchronize()  # other threads pack, on streams of their own
        offered = _Version(version, source, self._round)
        self._round = 0
        if async_op or self._delta:
            changed = offered.changed if self._delta and self._compares else None
            self._compares = False
            offered.source = self._copies = _snapshot(held, source, self._copies, changed)
        if not async_op:
            return self._send(offered, held)
        self._last = Sending(self._background.submit(self._send, offered, held))
        return self._last

    def close(self) -> None:
        """Leaves; on rank 0 the receivers are told that nothing more comes.

        Waits for a version that is being sent; raises its error if nobody has seen it.
        """
        self._background.shutdown()
        with contextlib.suppress(OSError, TimeoutError, RuntimeError):
            self._io.run(self._say_goodbye())
        super().close()
        if self._last is not None and not self._last.seen:
            self._last.wait()

    def _send(self, serving: _Version, held: list[Held]) -> Report:
        self._serving, version = serving, serving.number
        try:
            answer = self._io.run(self._offer(version, held))
        finally:
            self._serving = None
        if answer["op"] == "refused":
            reason = answer["reason"]
            if answer.get("lost"):
                raise ConnectionError(f"version {version} was not sent: {reason}")
            raise RuntimeError(f"version {version} was not sent: {reason}")
        for receiver, reason in answer["failed"].items():
            warnings.warn(f"receiver {receiver} does not have version {version}: {reason}", stacklevel=3)
        nbytes = sum(outlet.nbytes for outlet in serving.outlets)
        return Report(version, tuple(answer["receivers"]), answer["failed"], tuple(answer["unused"]), nbytes)

    async def _offer(self, version: int, held: list[Held]) -> Message:
        """Asks to send a version, which `_serve` does then; returns how it was sent."""
        if self._control is None:
            self._told = None
        try:
            await self._join(self._timeout)
        except (OSError, TimeoutError) as error:
            raise TimeoutError(
                f"sender {self.rank} has not reached sender 0 at {self._host}:{self._port} within {self._timeout:g} s: "
                f"{error}; check the address, and that rank 0 has a WeightSender"
            ) from error
        told = None if held == self._told else encode(held)
        self._told = held
        try:
            return await self._ask({"op": "send", "version": version, "held": told})
        except OSError as error:
            raise ConnectionError(
                f"sender {self.rank} has lost sender 0, which was to say how it went: {error}; restart it, then send "
                "again"
            ) from error

    async def _say_goodbye(self) -> None:
        if self.rank == 0:
            await self._coordinator.say_goodbye()
        if self._control is not None:
            await self._control.send({"op": "bye"})

    async def _serve(self, connection: Connection) -> None:
        hello = await connection.receive()
        runs = buckets(decode(Piece, hello["pieces"]), self._bucket)
        # Other receivers, which wait for a bucket that this one does not read, have twice the patience.
        outlet = Outlet(connection, hello, self._timeout / 2)
        while True:
            ask = await outlet.asked()
            version = self._serving
            if version is None or version.number != ask["version"] or ask["round"] <= version.base:
                return  # of a round that is over
            version.outlets.append(outlet)
            self._round, base = ask["round"], ask["base"]
            if outlet.segment is not None and ask["one_host"]:
                base = None  # changes save no bytes of a network, and are slower to find than all is to copy
            else:
                self._compares = True
            packed = partial(self._packed, outlet, runs, base, version)
            numbers = range(int(ask["first"]), len(runs))
            await outlet.send(numbers, self._free, partial(self._check, version), partial(asyncio.to_thread, packed))

    async def _check(self, version: _Version, number: int) -> None:
        if self._serving is not version:  # `send` was interrupted, so the caller may write
            raise ConnectionError(f"version {version.number} is not sent any more; read the log of sender {self.rank}")

    def _packed(
        self, outlet: Outlet, runs: Runs, base: int | None, version: _Version, number: int, bucket: Bucket
    ) -> tuple[Message, torch.Tensor | None]:
        offset, nbytes, pieces = runs[number]
        message: Message = {"at": offset, "nbytes": nbytes}
        if version.base and base == version.base:
            found = changes(pieces, version.source, version.changed)
            if found is not None:
                message["changes"], data = found
                return message, data
        values = [holding(one, version.source) for one in pieces]
        device = values[0].tensor.device
        if outlet.segment is not None and device.type == "cpu":
            pack(pieces, values, outlet.segment[offset : offset + nbytes])
            return message, None
        data = bucket.on(device, nbytes)
        pack(pieces, values, data)
        if device.type != "cpu" and outlet.link(device) is None:
            data = bucket.on(torch.device("cpu"), nbytes).copy_(data)  # waits for the device
        return message, data


@dataclass
class _Version:
    """A version that receivers can ask for."""

    number: int
    source: Source
    base: int  # the round in which the version before was sent; 0: in none
    changed: Changed = field(default_factory=dict)  # since then; with `delta`, and of tensors that both have
    outlets: list[Outlet] = field(default_factory=list)  # that have sent some of it


@torch.no_grad()
def _snapshot(held: list[Held], source: Source, before: Source, changed: Changed | None) -> Source:
    """Copies in host memory, in the dtypes that are sent; into those of the version before, where they fit. `changed`
    gets what differs from these.
    """
    dtypes = {one.name: one.dtype for one in held}
    copies: dict[str, list[Values]] = {}
    for name, parts in source.items():
        old = {one.box: one.tensor for one in before.get(name, ())}
        copies[name] = []
        for one in parts:
            on_device = one.of(one.box)
            if on_device.device.type != "cpu":
                on_device = on_device.to(dtypes[name])  # cast before it is moved: fewer bytes
            copy = old.get(one.box)
            if copy is None or copy.dtype != dtypes[name] or changed is None or copy.itemsize > 8:
                if copy is None or copy.dtype != dtypes[name]:
                    pinned = on_device.device.type == "cuda"
                    copy = torch.empty(on_device.shape, dtype=dtypes[name], pin_memory=pinned)
                copy.copy_(on_device, non_blocking=True)
            else:
                changed[name, one.box] = update(copy, on_device.cpu())
            copies[name].append(Values(one.box, copy))
    if any(one.tensor.device.type == "cuda" for parts in source.values() for one in parts):
        torch.cuda.synchronize()
    return copies
