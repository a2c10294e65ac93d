"""The worlds that checks run in: ranks over NCCL that share one GPU, ranks over gloo, and one rank that plays several.

NCCL refuses two ranks on one device if their hosts are equal. `NCCL_HOSTID` makes each rank look like a separate host,
connected over loopback. `Mirror` needs nothing of that: real streams, allocator, packing and NCCL calls, on one rank.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ON_CPU = os.environ.get("SHARDKIT_GPU_TESTS") == "cpu"
DEVICE = "cpu" if ON_CPU else "cuda"


class Skip(Exception):
    """A check that means nothing here; the message says why."""


def needs_gpu() -> None:
    """Skips the rest of a check on a CPU."""
    if ON_CPU:
        raise Skip("needs a GPU")


@dataclass(frozen=True)
class Place:
    """Where a check runs; `directory` is for files that it leaves."""

    rank: int
    world: int
    device: torch.device
    directory: Path

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        return init_device_mesh(self.device.type, shape or (self.world,), mesh_dim_names=names)


def enter(kind: str, rank: int, world: int, store: str, directory: Path) -> Place:
    """Joins the world of `kind`; on a CPU all but "mirror" and "none" are gloo.

    "nccl", "bound" (NCCL, with the group bound to its device), "gloo" for the device's tensors, "mirror", or "none".
    """
    device = torch.device(DEVICE) if ON_CPU else torch.device("cuda", 0)
    place = Place(rank, world, device, directory)
    if kind == "none":
        return place
    if not ON_CPU:
        torch.cuda.set_device(device)
        torch.cuda.init()
    if kind == "mirror":
        dist.Backend.register_backend("mirror", Mirror.create, devices=["cpu", "cuda"])
        dist.init_process_group("mirror", store=dist.HashStore(), rank=0, world_size=world)
        return place
    dist.init_process_group(
        "gloo" if ON_CPU else f"cpu:gloo,cuda:{'gloo' if kind == 'gloo' else 'nccl'}",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        device_id=device if kind == "bound" and not ON_CPU else None,
    )
    return place


class Mirror(dist.ProcessGroup):
    """A group of several ranks of which only this one exists: all others hold what it holds.

    So a gather repeats this rank's chunk, and the mean over the ranks is this rank's row. Each collective also runs on
    a real group of one rank (NCCL on a GPU). Kernels that copy chunks stand for writes of the network.
    """

    host_seconds = 0.0
    """Time that the host has spent here, where stock and ours are timed without the network."""
    launches: ClassVar[int | None] = None
    """How many gathers can be launched until one fails; None if none does."""
    delays: ClassVar[dict[str, int]] = {}
    """Cycles that the stream of each kind ("gather", "reduce", in checks also "compute") sleeps before its work."""

    def __init__(self, rank: int, world: int, timeout: timedelta) -> None:
        super().__init__(rank, world)
        self._rank, self._world = rank, world
        self._one = _one_rank(timeout)

    @classmethod
    def create(cls, store: dist.Store, rank: int, world: int, timeout: timedelta) -> "Mirror":
        return cls(rank, world, timeout)

    def getBackendName(self) -> str:  # noqa: N802 (the name that C++ calls)
        return "mirror"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def name(self) -> str:
        return "nccl"

    def shutdown(self) -> None:
        self._one._get_backend(torch.device(DEVICE)).shutdown()

    def _get_backend(self, device: torch.device) -> Any:
        if ON_CPU:  # not gloo's, with which ranks share memory
            return SimpleNamespace(supports_coalescing=True, name=self.name)
        return self._one._get_backend(device)

    def allgather_into_tensor_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        began = _slept("gather")
        rows = [output.view(self._world, -1).unbind() for output in outputs]
        flat = [one.view(-1) for one in inputs]
        others = [
            (row, own)
            for some, own in zip(rows, flat, strict=True)
            for row in (*some[: self._rank], *some[self._rank + 1 :])
        ]
        if others:
            torch._foreach_copy_(*map(list, zip(*others, strict=True)))
        own = [some[self._rank] for some in rows]
        return _done(began, self._one.allgather_into_tensor_coalesced(own, flat, opts))

    def _allgather_base(self, output: Any, given: Any, opts: Any) -> Any:
        return self.allgather_into_tensor_coalesced([output], [given], opts)

    def allgather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Any:
        began = _slept("gather")
        for own, given in zip(outputs, inputs, strict=True):
            torch._foreach_copy_(list(own), [given] * len(own))
        return _done(began)

    def reduce_scatter_tensor_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        began = _slept("reduce")
        own = [given.view(self._world, -1)[self._rank] for given in inputs]
        flat = [output.view(-1) for output in outputs]
        if opts.reduceOp != dist.ReduceOp.AVG:
            assert opts.reduceOp == dist.ReduceOp.SUM, opts.reduceOp
            own = [row * self._world for row in own]
        opts.reduceOp = dist.ReduceOp.SUM  # of one rank; NCCL may be wrong about its mean
        return _done(began, self._one.reduce_scatter_tensor_coalesced(flat, own, opts))

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [given], opts)

    def allreduce(self, tensors: Sequence[Any], opts: Any) -> Any:
        began = _slept("reduce")
        if opts.reduceOp == dist.ReduceOp.SUM:
            torch._foreach_mul_(list(tensors), self._world)
        opts.reduceOp = dist.ReduceOp.SUM
        return _done(began, self._one.allreduce(list(tensors), opts))

    def broadcast(self, tensors: Sequence[Any], opts: Any) -> Any:
        return _done(time.perf_counter())

    def barrier(self, opts: Any = None) -> Any:
        return _done(time.perf_counter())

    # Names since torch 2.13.
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced


def _one_rank(timeout: timedelta) -> dist.ProcessGroup:
    """A process group of one rank, made as torch makes its own."""
    group, kinds = dist.ProcessGroup(dist.HashStore(), 0, 1), dist.ProcessGroup.BackendType
    if ON_CPU:
        backend, kind = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout), kinds.GLOO
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend, kind = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options), kinds.NCCL
    group._set_default_backend(kind)
    group._register_backend(torch.device(DEVICE), kind, backend)
    return group


def _slept(kind: str) -> float:
    if kind == "gather" and Mirror.launches is not None:
        Mirror.launches -= 1
        if Mirror.launches < 0:
            raise RuntimeError("a launch fails, as the check wants it")
    if Mirror.delays.get(kind):
        torch.cuda._sleep(Mirror.delays[kind])
    return time.perf_counter()


class _Done(dist.Work):
    """A work that is done: everything was queued on the current stream."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


def _done(began: float, work: Any = None) -> Any:
    Mirror.host_seconds += time.perf_counter() - began
    return _Done() if work is None else work
