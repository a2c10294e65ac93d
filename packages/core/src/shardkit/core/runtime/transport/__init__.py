"""How the bytes of a plan move: what a process group can do is asked here, once per group."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from shardkit.core import torch_compat
from shardkit.core.runtime.transport.c10d import C10dTransport
from shardkit.core.runtime.transport.interface import Exchange, Transport
from shardkit.core.runtime.transport.pairwise import PairwiseTransport

__all__ = ["C10dTransport", "Exchange", "PairwiseTransport", "Transport", "transport_for"]

# A transport holds its group, so the cache must not hold the transport: the plans that use it do.
_cache: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, weakref.ref[C10dTransport | PairwiseTransport]]]
_cache = weakref.WeakKeyDictionary()


def transport_for(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport of `group` for tensors on `device`; the same object as long as somebody uses it.

    gloo on CPU exchanges pairwise; a backend that coalesces (NCCL) runs collectives in place; any other backend (MPI,
    XCCL, the in-process threaded group, the fake group) runs plain collectives on packed buffers. Not collective.
    """
    by_device = _cache.setdefault(group, {})
    reference = by_device.get(device)
    transport = reference() if reference is not None else None
    if transport is None:
        transport = _make_transport(group, device)
        by_device[device] = weakref.ref(transport)
    return transport


def _make_transport(group: dist.ProcessGroup, device: torch.device) -> C10dTransport | PairwiseTransport:
    backend = torch_compat.backend_of(group, device)
    if backend is not None and device.type == "cpu" and backend.name() == "gloo":
        return PairwiseTransport(group, device)
    return C10dTransport(group, device, direct=bool(getattr(backend, "supports_coalescing", False)))
