"""How the parameters of a group are gathered: transports, plans, sources and targets of a gather, and its waits."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from shardkit.core import events
from shardkit.core.engine.order_check import agree
from shardkit.core.engine.room import Group
from shardkit.core.engine.schedule import Schedule
from shardkit.core.parameters.param import FSDPParam
from shardkit.core.runtime.choice import Communication, Transports, may_share_memory, transport_for
from shardkit.core.runtime.collective import gather_alone
from shardkit.core.runtime.lanes import Ticket
from shardkit.core.runtime.plan import GatherItem, GatherPlan, plan_gather
from shardkit.core.runtime.sharding import ChunkLayout
from shardkit.core.runtime.shared.meeting import possible
from shardkit.core.runtime.shared.segment import shared_copies
from shardkit.core.runtime.storage import outside_inference, part_of
from shardkit.core.torch_compat import versions_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class GatherPlans:
    """The plans of a group's gathers, made from its parameters: after a load or a cast both are others.

    Attributes:
        params: the parameters.
        items: of each parameter; empty ones of a parameter that is its own shard.
        sharded: the plan of a gather over the shard group; None for a single rank, or without items.
        kept: that of a gather of the parts that a smaller group keeps, from its first one on.
        has_subclass: whether a tensor subclass decides at each gather what is sent.
    """

    params: list[FSDPParam]
    items: list[list[GatherItem]]
    sharded: GatherPlan | None
    has_subclass: bool
    kept: GatherPlan | None = None

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes that a running gather takes besides the unsharded parameters."""
        plans = (plan for plan in (self.sharded, self.kept) if plan is not None)
        return max((plan.transport.gather_buffer_bytes(plan) for plan in plans), default=0)

    @cached_property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded parameters; not for subclasses, which decide that at each gather."""
        return sum(param.unsharded_bytes for param in self.params)


class Gathered(Group, Protocol):
    """A parameter group, which `group.py` documents."""

    schedule: Schedule[Any]
    transports: tuple[Communication, Transports] | None
    plans: GatherPlans | None
    offloaded: bool
    cast_shards: torch.Tensor | None


def place_shards(group: Gathered, params: Sequence[FSDPParam]) -> None:
    """Moves the shards of `params`, just made or assigned, to where they are gathered from.

    That is pinned memory if they are offloaded, or shared memory if peers on this host read them.
    """
    if group.offloaded:
        _pin_together([param for param in params if param.pinned])
    over = group.mesh.shard_group
    if over is None or not may_share_memory(over, group.device) or not possible():
        return
    shards = {param: shard for param in params if (shard := param.shard_to_share) is not None}
    for param, copy in zip(shards, shared_copies(list(shards.values())), strict=True):
        param.move_shard(copy)


def _pin_together(params: Sequence[FSDPParam]) -> None:
    """Moves shards on the host that are not pinned to one buffer for each dtype, so that they cross in one copy."""
    unpinned: dict[torch.dtype, list[FSDPParam]] = {}
    for param in params:
        shard = param.shard
        if type(shard) is torch.Tensor and shard.device.type == "cpu" and not shard.is_pinned():
            unpinned.setdefault(shard.dtype, []).append(param)
    with outside_inference():
        for dtype, together in unpinned.items():
            sizes = [param.shard.numel() for param in together]
            buffer = torch.empty(sum(sizes), dtype=dtype, device="cpu", pin_memory=True)
            for param, part in zip(together, buffer.split(sizes), strict=True):
                param.move_shard(part_of(buffer, part.view(param.shard.shape).copy_(param.shard)))


def _prepare(group: Gathered) -> tuple[Transports, GatherPlans]:
    """The transports and plans, made by the first gather after a change (collective: ranks of the shard group meet)."""
    chosen = group.transports
    if chosen is None or chosen[0] is not group.settings.communication:
        communication = group.settings.communication
        with events.waiting(group.label, "set-up"):
            transports = communication.transports(group.mesh.shard_group, group.device, group.label)
        chosen = group.transports = communication, transports
        names = [None if one is None else one.name for one in (transports.gather, transports.reduce)]
        _LOG.debug("%s: gathers through %s, reduces through %s", group.label, *names)
    if group.plans is None:
        for param in group.params:
            param.check_ready()
        has_subclass = any(param.subclass for param in group.params)
        items = [] if has_subclass else [param.items([]) for param in group.params]
        group.plans = _plan(group, chosen[1], items, has_subclass)
    return chosen[1], group.plans


def _plan(group: Gathered, transports: Transports, items: list[list[GatherItem]], has_subclass: bool) -> GatherPlans:
    plan, sent = None, [item for each in items for item in each]
    if transports.gather is not None and sent:
        plan = plan_gather(sent, transports.gather, group.label, group.mesh.shard_rank)
    return GatherPlans(group.params, items, plan, has_subclass)


def gather_bytes(group: Gathered, *, from_kept: bool) -> int:
    """Bytes that the next gather takes besides the unsharded parameters.

    Collective until there are plans: ranks of one host meet to choose a transport.
    """
    transports, plans = _prepare(group)
    if from_kept:
        plans = _with_kept(group, plans)
    return 0 if transports.gather is None else plans.buffer_bytes


def gather_sharded(group: Gathered) -> Ticket | None:
    """Starts a gather from the shards. None if there is nothing to wait for."""
    params = group.params
    transports, plans = _prepare(group)
    before, group.versions = group.versions, versions_of([param.sharded_param for param in params])
    if group.settings.post_forward_mesh is not None:  # forward gathers the shards, and needs no kept parts
        for param in params:
            param.kept.clear()
    if plans.has_subclass:
        inputs = [param.sources() for param in params]
        items = [param.items(sources) for param, sources in zip(params, inputs, strict=True)]
        if items != plans.items:
            _check_wire_sizes(group, transports, items)
            plans = group.plans = _plan(group, transports, items, has_subclass=True)
        sources = [source for each in inputs for source in each]
    else:
        sources = [source for param in params for source in param.sources()]
    if not sources:  # every parameter is its own shard
        return None
    context = group.schedule.context
    lane, transport = context.gathers, transports.gather
    read = sources
    if group.offloaded:
        dtypes = [item.dtype for each in plans.items for item in each]
        read = context.on_device(sources, dtypes, group.cast_shards)
    # The lane owns the memory: it frees and allocates in its own order, and need not wait for the compute stream.
    with lane.owning_memory():
        with contextlib.nullcontext() if transport is None else transport.registered_memory():
            for param, items_of in zip(params, plans.items, strict=True):
                param.allocate(items_of)
        targets = [target for param in params for target in param.targets]
        if plans.sharded is not None:
            program = plans.sharded.transport.gather(plans.sharded, read, targets)
        else:
            program = gather_alone(read, targets)
    if plans.sharded is None and not lane.has_streams:  # a single rank on a CPU: a copy, which ends here
        next(program, None)
        return None
    # The lane waits for the current stream only if that has written to the shards: everything that computes would delay
    # the gather. The inputs of fsdp_pre_all_gather are always made there, just before this.
    if (written := before != group.versions) and lane.has_streams:
        context.wait_for_writers()
    ticket = lane.start(program, group.label, sources, after_current=written or plans.has_subclass)
    if transport is not None and transport.peers_read_shards:
        context.note_read_by_peers(ticket, transport)
    return ticket


def _check_wire_sizes(group: Gathered, transports: Transports, items: list[list[GatherItem]]) -> None:
    """Checks that ranks agree on the sizes that subclasses chose; different sizes would hang (collective).

    Raises:
        ValueError: on every rank of the shard group.
    """
    uneven = [
        (param, [(item.layout.numel, str(item.dtype)) for item in items_of])
        for param, items_of in zip(group.params, items, strict=True)
        if param.subclass is not None and param.layout.padded_numel != param.layout.numel
    ]
    over = group.mesh.shard_group
    if not uneven or over is None or transports.gather is None:
        return
    if agree(repr([sent for _, sent in uneven]).encode(), over, group.device):
        return
    param = uneven[0][0]
    assert param.subclass is not None
    shapes = [layout.padded_local_shape for layout in param.subclass.layouts]
    raise ValueError(
        f"parameter '{param.fqn}' of shape {tuple(param.shape)} is sharded unevenly over {over.size()} ranks, and "
        f"its fsdp_pre_all_gather returned tensors of other sizes on other ranks, here {shapes}; pad them to "
        f"the size for a full chunk, {param.layout.padded_local_shape}"
    )


def gather_kept(group: Gathered) -> Ticket:
    """Starts a gather from the parts that a smaller group keeps."""
    _, plans = _prepare(group)  # transports of the reduction, too
    plan = _with_kept(group, plans).kept
    assert plan is not None
    lane = group.schedule.context.gathers
    with lane.owning_memory():
        with plan.transport.registered_memory():
            for param in group.params:
                param.allocate([])
        sources = [part for param in group.params for part in param.kept]
        targets = [flat for param in group.params for flat in param.flats]
        program = plan.transport.gather(plan, sources, targets)
    # The lane has waited for the parts: they were copied before the memory was freed.
    return lane.start(program, group.label, after_current=False)


def _with_kept(group: Gathered, plans: GatherPlans) -> GatherPlans:
    if plans.kept is None:
        smaller = group.settings.post_forward_mesh
        assert smaller is not None
        flats = [(param.fqn, flat) for param in group.params for flat in param.flats]
        items = [GatherItem(fqn, ChunkLayout((flat.numel(),), 0, smaller.size), flat.dtype) for fqn, flat in flats]
        transport = transport_for(smaller.group, group.device, group.settings.communication.registered)
        plans = group.plans = replace(plans, kept=plan_gather(items, transport, group.label, smaller.rank))
    return plans
