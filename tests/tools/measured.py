"""The memory of real ranks: every live storage counted after every operator, and core's communication as it happens."""

import contextlib
import os
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit.core import events
from shardkit.core.runtime import choice
from shardkit.core.runtime.shared import meeting, segment
from shardkit.tools.profiling.log import STARTED
from tests.tools.jobs import JOBS, mesh_of


class Meter(TorchDispatchMode):
    """The bytes of all storages that operators have returned and that live. Shared memory is counted by the segment."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: Any = weakref.WeakValueDictionary()
        self.mapped: set[int] = set()
        self.earlier = weakref.WeakSet(segment._segments)  # of other tests' models, which may still be alive
        self.peak = 0
        self.at = ""
        self.slow = False
        self.looking = True
        self.outbox = self.outbox_at_peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if FakeTensor in types:  # DTensor finds out the shapes of its results with them
            return function(*args, **(kwargs or {}))
        if any(one not in (torch.Tensor, torch.nn.Parameter) for one in types):
            # The operators that a DTensor, or another subclass, runs inside come by.
            return NotImplemented
        if self.slow and function in (torch.ops.aten.mm.default, torch.ops.aten.convolution_backward.default):
            time.sleep(0.0005)  # in a long run each rank is ahead of the others at times, and its outbox grows
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.from_file.default:  # memory of another rank, mapped into this one
            self.mapped.add(out.data_ptr())
            return out
        for tensor in [*args, *(out if isinstance(out, tuple | list) else (out,))]:
            if isinstance(tensor, torch.Tensor):
                self.keep(tensor)
        if self.looking and (now := self.now()) > self.peak:
            self.peak, self.at, self.outbox_at_peak = now, str(function), self.outbox
        return out

    def hear(self, event: Any) -> None:
        if getattr(event, "kind", None) == "outbox":
            self.outbox += event.bytes if isinstance(event, events.StorageAllocated) else -event.bytes

    def keep(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # By the storage: an empty tensor at the end of shared memory has no address of its own.
        if address in self.mapped or any(0 <= address - one.address < one.nbytes for one in segment._segments):
            return
        self.storages.setdefault(storage._cdata, storage)

    def now(self) -> int:
        own = sum(storage.nbytes() for storage in self.storages.values())
        return own + sum(one.nbytes for one in segment._segments if one not in self.earlier)


@dataclass
class Measured:
    peak: int
    outbox: int
    at: str
    communication: list[tuple[Any, ...]]


@contextlib.contextmanager
def shared_memory(allowed: bool):
    """Whether ranks share memory, within this context: they decide it anew, whatever ran in these processes before.

    A model of another test that is still alive may hold a transport of the same group.
    """
    os.environ["SHARDKIT_SHARED_MEMORY"] = "1" if allowed else "0"
    caches = (meeting._known, choice._cache)
    before = [dict(cache) for cache in caches]
    for cache in caches:
        cache.clear()
    try:
        yield
    finally:
        del os.environ["SHARDKIT_SHARED_MEMORY"]
        for cache, known in zip(caches, before, strict=True):
            cache.clear()
            cache.update(known)


def run_job(rank: int, world_size: int, name: str, shared: bool) -> Measured:
    """Trains for some iterations and measures the last one, in which nothing is set up any more."""
    job, axes = JOBS[name], mesh_of(name, world_size)
    found: list[tuple[Any, ...]] = []

    def hear(event: Any) -> None:
        if kind := STARTED.get(type(event)):
            found.append((kind, event.fqn, event.bytes, event.wire_bytes, str(event.dtype)))

    with shared_memory(shared), Meter() as meter, events.subscribe(meter.hear), events.subscribe(hear):
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        model = job.build(mesh)
        optimizer = job.optimizer(model.parameters())
        for number in range(4):
            meter.slow = shared and world_size > 1 and (rank + number) % 2 == 1
            batches = [job.inputs() for _ in range(job.policies.accumulate)]
            meter.looking = number == 3
            found.clear()
            job.run(model, optimizer, batches)
            del batches
    return Measured(meter.peak, meter.outbox_at_peak, meter.at, found)
