"""Selects the transport of a parameter group from the user's settings and the capabilities of its process groups.

A simulator runs a model on one process with a fake process group, and needs the plans, memory and events of a real
network. It supplies transports with the properties of the real ones, whose programs need not copy anything; `stand_ins`
installs them in place of all others.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from shardkit.core import torch_compat
from shardkit.core.runtime.collective import C10dTransport
from shardkit.core.runtime.memory import RegisteredMemory
from shardkit.core.runtime.plan import Transport
from shardkit.core.runtime.shared.meeting import neighbours_of, possible
from shardkit.core.runtime.shared.transport import SharedTransport

__all__ = ["Transports", "coalesces", "may_share_memory", "stand_ins", "transport_for"]

StandIn: TypeAlias = Callable[[dist.ProcessGroup, torch.device], Transport]
"""Returns a transport that replaces that of a group, for tensors on a device."""

_stand_in: StandIn | None = None

_LAUNCHES_EACH = ("nccl2", "nccl-lazy")

# A transport holds its group, so the cache must not hold the transport; the plans that use it do.
_Key: TypeAlias = tuple[torch.device, bool]
_cache: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, weakref.ref[Transport]]]
_cache = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Transports:
    """The transports of a group; None if there are no other ranks."""

    gather: Transport | None
    reduce: Transport | None


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
        backend = torch_compat.backend_of(group, device)
        if group.size() > 1 and _is_gloo(backend, device) and (neighbours := neighbours_of(group)) is not None:
            transport = SharedTransport(group, device, neighbours)
        else:
            memory = RegisteredMemory.of(group, device) if registered else None
            transport = C10dTransport(group, device, direct=coalesces(backend), memory=memory)
        by_kind[device, registered] = weakref.ref(transport)
    return transport


def may_share_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `transport_for` would share memory if all ranks were on one host. Not collective."""
    return group.size() > 1 and _is_gloo(torch_compat.backend_of(group, device), device) and possible()


def _is_gloo(backend: Any, device: torch.device) -> bool:
    return backend is not None and device.type == "cpu" and backend.name() == "gloo"


def coalesces(backend: Any) -> bool:
    """Whether a backend moves a list of buffers in one launch.

    torch 2.15's NCCL backends say so, and launch each buffer by itself. The wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL
    says so of the backend inside, and lacks the calls before torch 2.13.
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
