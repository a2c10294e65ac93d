"""How the bytes of a plan move: what a process group can do is asked here, once per group."""

from __future__ import annotations

import weakref
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from shardkit.core import torch_compat
from shardkit.core.policies import CompressionPolicy
from shardkit.core.runtime.shared.meeting import neighbours_of, possible
from shardkit.core.runtime.transport.c10d import C10dTransport
from shardkit.core.runtime.transport.compressed import CompressedTransport
from shardkit.core.runtime.transport.interface import Collective, Exchange, Transport
from shardkit.core.runtime.transport.pairwise import PairwiseTransport
from shardkit.core.runtime.transport.shared import SharedTransport
from shardkit.core.runtime.transport.stand_in import StandIn, chosen_stand_in, stand_ins

__all__ = [
    "C10dTransport",
    "Collective",
    "CompressedTransport",
    "Exchange",
    "PairwiseTransport",
    "SharedTransport",
    "StandIn",
    "Transport",
    "compressing",
    "may_share_memory",
    "stand_ins",
    "transport_for",
]

_BuiltIn: TypeAlias = C10dTransport | PairwiseTransport | SharedTransport

# A transport holds its group, so the cache must not hold the transport: the plans that use it do.
_cache: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, weakref.ref[_BuiltIn]]]
_cache = weakref.WeakKeyDictionary()


def transport_for(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport of `group` for tensors on `device`; the same object as long as somebody uses it.

    gloo on CPU shares memory if all ranks are on one host, and exchanges pairwise if not; a backend that coalesces
    (NCCL) runs collectives in place; any other backend (MPI, XCCL, the in-process threaded group, the fake group) runs
    plain collectives on packed buffers. Collective over `group` the first time, with gloo on CPU: the ranks
    have to meet.
    """
    stand_in = chosen_stand_in(group, device)
    if stand_in is not None:
        return stand_in
    by_device = _cache.setdefault(group, {})
    reference = by_device.get(device)
    transport = reference() if reference is not None else None
    if transport is None:
        transport = _make_transport(group, device)
        by_device[device] = weakref.ref(transport)
    return transport


def compressing(transport: Transport, policy: CompressionPolicy) -> Transport:
    """`transport` with the rounding of `policy`; itself where ranks share memory and nothing is on a wire."""
    return CompressedTransport(transport, policy) if isinstance(transport, Collective) else transport


def may_share_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `transport_for` would share memory if all ranks are on one host. Not collective."""
    return possible() and group.size() > 1 and _is_gloo(torch_compat.backend_of(group, device), device)


def _is_gloo(backend: Any, device: torch.device) -> bool:
    return backend is not None and device.type == "cpu" and backend.name() == "gloo"


def _make_transport(group: dist.ProcessGroup, device: torch.device) -> _BuiltIn:
    backend = torch_compat.backend_of(group, device)
    if _is_gloo(backend, device):
        neighbours = neighbours_of(group) if group.size() > 1 else None
        return PairwiseTransport(group, device) if neighbours is None else SharedTransport(group, device, neighbours)
    return C10dTransport(group, device, direct=bool(getattr(backend, "supports_coalescing", False)))
