"""Selects the transport of a parameter group from the user's settings and the capabilities of its process groups."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from shardkit.core import torch_compat
from shardkit.core.policies import AllGather, CompressionPolicy, ReduceScatter
from shardkit.core.runtime.collective import C10dTransport, CustomTransport
from shardkit.core.runtime.compressed.transport import CompressedTransport
from shardkit.core.runtime.memory import registered_pool, require_memory
from shardkit.core.runtime.plan import Transport
from shardkit.core.runtime.shared.meeting import neighbours_of
from shardkit.core.runtime.shared.transport import SharedTransport

StandIn: TypeAlias = Callable[[dist.ProcessGroup, torch.device], Transport]
"""Returns a transport of a simulator: one with the plans, memory and events of a real one, that need not copy."""

_stand_in: StandIn | None = None

_LAUNCHES_EACH = ("nccl2", "nccl-lazy")

# A transport holds its group, so the cache must not hold the transport; the plans that use it do.
_cache = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[torch.device, bool], weakref.ref[Transport]]]()


@dataclass(frozen=True)
class Transports:
    """The transports of a group; None if there are no other ranks."""

    gather: Transport | None
    reduce: Transport | None


@dataclass(frozen=True)
class Communication:
    """Overrides of the transports that are chosen for the process groups. Labels are for messages."""

    compression: CompressionPolicy | None = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    reduce_group: dist.ProcessGroup | None = None  # for reductions, with the ranks of the shard group
    registered: bool = False  # whether communicated memory is registered with the process group (memory.py)

    def through(self, label: str, **comms: Any) -> Communication:
        """Sends gathers through `all_gather`, or reduce-scatters through `reduce_scatter`, and their buffers."""
        for comm in comms.values():
            self._refuse_compression(type(comm).__name__, label)
        return replace(self, **comms)

    def in_registered_memory(
        self, enable: bool, group: dist.ProcessGroup, device: torch.device, label: str
    ) -> Communication:
        """Sets whether memory that the shard group `group` communicates is registered with it."""
        for comm in (self.all_gather, self.reduce_scatter):
            if comm is not None:
                raise ValueError(
                    f"group '{label}' has custom communication ({type(comm).__name__}), which brings its own buffers; "
                    "use either of the two"
                )
        if enable:
            self._refuse_compression("memory of the process group", label)
            if group.size() > 1:
                require_memory(group, device, label)
        return replace(self, registered=enable)

    def _refuse_compression(self, name: str, label: str) -> None:
        if self.compression is not None:
            raise ValueError(
                f"group '{label}' has a {self.compression}, which makes rows of bytes of its own and cannot go "
                f"through {name}; shard it without compression_policy"
            )

    def transports(self, group: dist.ProcessGroup | None, device: torch.device, label: str) -> Transports:
        """The transports over the shard group `group` (collective over it the first time: its ranks meet)."""
        if group is None or group.size() == 1:
            return Transports(None, None)
        over = self.reduce_group or group
        try:
            if self.all_gather is not None:
                gather: Transport = CustomTransport(group, device, self.all_gather)
            else:
                gather = transport_for(group, device, self.registered)
            if self.reduce_scatter is not None:
                reduce: Transport = CustomTransport(over, device, self.reduce_scatter)
            else:
                reduce = transport_for(over, device, self.registered)
        except (OSError, RuntimeError) as error:  # a missing peer causes a timeout, of a socket or of gloo
            raise RuntimeError(
                f"{label}: set-up failed (meeting the other ranks of its group): {error}; "
                "check that every rank runs this forward"
            ) from error
        if self.compression is not None and self.compression.gather is not None and gather.collective:
            gather = CompressedTransport(gather, self.compression)
        if self.compression is not None and self.compression.reduce is not None and reduce.collective:
            reduce = CompressedTransport(reduce, self.compression)
        return Transports(gather, reduce)


def transport_for(group: dist.ProcessGroup, device: torch.device, registered: bool = False) -> Transport:
    """The transport of `group` for tensors on `device`; the same object as long as it is in use.

    gloo on CPU shares memory if all ranks are on one host. A backend that coalesces (NCCL before torch 2.15) runs
    collectives in place. Any other backend (gloo between hosts, nccl2, MPI, XCCL, the in-process threaded group, the
    fake group) runs plain collectives on packed buffers. Ask `require_memory` before `registered`. With gloo
    on CPU, and with `registered`, collective over `group` the first time, because the ranks meet.
    """
    if _stand_in is not None:
        return _stand_in(group, device)
    by_kind = _cache.setdefault(group, {})
    reference = by_kind.get((device, registered))
    transport = reference() if reference is not None else None
    if transport is None:
        # All ranks meet, also one that cannot share memory: the others learn of it there.
        if torch_compat.is_gloo_on_cpu(group, device) and (neighbours := neighbours_of(group)) is not None:
            transport = SharedTransport(group, device, neighbours)
        else:
            memory = registered_pool(group, device) if registered else None
            together = coalesces(torch_compat.backend_of(group, device))
            transport = C10dTransport(group, device, coalesces=together, memory=memory)
        by_kind[device, registered] = weakref.ref(transport)
    return transport


def coalesces(backend: Any) -> bool:
    """Whether a backend moves a list of buffers in one launch.

    torch 2.15's NCCL backends say so, and launch each by itself. The wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL says so
    of the backend inside, and lacks the calls before torch 2.13.
    """
    if not getattr(backend, "supports_coalescing", False):
        return False
    return backend.name() not in _LAUNCHES_EACH and not hasattr(backend, "wrapped_pg")


@contextlib.contextmanager
def stand_ins(stand_in: StandIn) -> Iterator[None]:
    """Within this context, parameter groups that need a transport get one from `stand_in`.

    A parameter group asks once, so shard and drop models inside the context.
    """
    global _stand_in  # noqa: PLW0603 - one simulation a process, as one default process group
    before, _stand_in = _stand_in, stand_in
    try:
        yield
    finally:
        _stand_in = before
