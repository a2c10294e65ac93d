"""How the parameters of a group are gathered: transports, plans, sources and targets of a gather, and its waits."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, contains, eq, is_

import torch
from torch import nn

from shardkit.core import events
from shardkit.core.engine.communication import Communication
from shardkit.core.engine.context import CommContext
from shardkit.core.engine.order_check import agree
from shardkit.core.mesh import DataParallelMesh, PostForwardMesh
from shardkit.core.parameters.adapters import HOOK
from shardkit.core.parameters.param import FSDPParam
from shardkit.core.parameters.slot import Slot, Slots
from shardkit.core.policies import CompressionPolicy
from shardkit.core.runtime.choice import Transports, may_share_memory, transport_for
from shardkit.core.runtime.collective import gather_alone
from shardkit.core.runtime.lanes import Ticket
from shardkit.core.runtime.plan import GatherItem, GatherPlan, Transport, plan_gather
from shardkit.core.runtime.sharding import ChunkLayout
from shardkit.core.runtime.shared.segment import shared_if_possible
from shardkit.core.torch_compat import local_of, version_of

__all__ = ["GroupGather"]

_gathered_version = attrgetter("gathered_version")


class GroupGather:
    """The gather of one group's parameters, from the shards or from the parts that a smaller group keeps.

    Attributes:
        label: name of the group in messages.
        context: the lanes that it shares with the other groups of its root.
        stale: whether an optimizer has stepped since the last gather, so that unsharded parameters are out of date.
    """

    def __init__(
        self,
        params: list[FSDPParam],
        mesh: DataParallelMesh,
        device: torch.device,
        post_forward_mesh: PostForwardMesh | None,
        compression: CompressionPolicy | None,
    ) -> None:
        self.params = params
        self.mesh = mesh
        self.device = device
        self.post_forward_mesh = post_forward_mesh
        self.label = ", ".join(param.fqn for param in params[:1])
        self.context = CommContext(device)
        self.stale = False
        self._communication = Communication(compression)
        self._transports: Transports | None = None  # chosen by the first gather
        self._transports_of: Communication | None = None  # that they were chosen for
        self._offloaded = any(param.offload is not None for param in params)
        self._written = True  # an optimizer has stepped since the lane last waited for writers of the shards
        self._checked = False  # whether the parameters are where a gather needs them
        self._plan: GatherPlan | None = None
        self._items: list[list[GatherItem]] = []
        self._kept_plan: GatherPlan | None = None
        self._buffer_bytes: int | None = None
        self._parameter_bytes: int | None = None
        self._columns: _Columns | None = None
        self._holders: dict[weakref.ReferenceType[nn.Module], dict[FSDPParam, list[Slot]]] | None = None
        self._subclassed: bool | None = None
        self._share_shards(self.params)

    # -- what moves the bytes ------------------------------------------------------------------------------------------

    @property
    def communication(self) -> Communication:
        """How its bytes are sent; a change takes effect at the next gather, and with the reductions after it."""
        return self._communication

    @communication.setter
    def communication(self, communication: Communication) -> None:
        if self._transports is not None:
            self._transports.forget_residuals()
        self._communication = communication
        self._forget_plans()

    def _chosen_transports(self) -> Transports:
        """The transports, chosen by the first gather after a change (collective: ranks of the shard group meet)."""
        if self._transports is None or self._transports_of is not self._communication:
            with events.Waiting(self.label, "set-up"):
                self._transports = self._communication.transports(self.mesh.shard_group, self.device, self.label)
            self._transports_of = self._communication
        return self._transports

    def _share_shards(self, params: Sequence[FSDPParam]) -> None:
        """Moves the shards of `params` into shared memory, if peers on this host are to gather them from there."""
        group = self.mesh.shard_group
        if group is None or not may_share_memory(group, self.device):
            return
        shards = {param: shard for param in params if (shard := param.shard_to_share) is not None}
        for param, copy in zip(shards, shared_if_possible(list(shards.values()), self.label), strict=True):
            param.move_shard(copy)

    def _held_by(self, module: nn.Module) -> dict[FSDPParam, list[Slot]]:
        """The parameters of this group that `module` itself holds, with its slots."""
        if self._holders is None:
            self._holders = {}
            for param in self.params:
                for slot in param.slots:
                    if slot.module() is not None:
                        self._holders.setdefault(slot.module, {}).setdefault(param, []).append(slot)
        return self._holders.get(weakref.ref(module), {})

    def forget_params(self) -> None:
        """Forgets which tensors the parameters and their slots have, and with them all plans."""
        self._columns = None
        self._holders = None
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._checked = False
        self._plan = None
        self._items = []
        self._kept_plan = None
        self._buffer_bytes = None
        self._parameter_bytes = None
        self._subclassed = None

    # -- how much memory it takes --------------------------------------------------------------------------------------

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded parameters while they have memory."""
        if self._parameter_bytes is None:
            self._parameter_bytes = sum(param.unsharded_bytes for param in self.params)
        return self._parameter_bytes

    @property
    def _gather_bytes(self) -> int:
        if self._buffer_bytes is None:
            self._buffer_bytes = self._count_buffer_bytes()
        return self._buffer_bytes + self.unsharded_bytes

    def _count_buffer_bytes(self) -> int:
        transport = self._chosen_transports().gather
        if transport is None:
            return 0
        if self._plan is None and not self._has_subclass:
            self._items = [param.items([]) for param in self.params]
            self._plan = self._plan_sharded(transport)
        plans = (plan for plan in (self._plan, self._kept_plan) if plan is not None)
        return max((plan.transport.gather_buffer_bytes(plan) for plan in plans), default=0)

    def _plan_sharded(self, transport: Transport) -> GatherPlan:
        items = [item for each in self._items for item in each]
        return plan_gather(items, transport, self.label, self.mesh.shard_rank)

    # -- gathers -------------------------------------------------------------------------------------------------------

    def note_step(self) -> None:
        """Notes that an optimizer has stepped, which bumps no version counter."""
        self.stale = self._written = True

    def _refresh(self, params: Sequence[FSDPParam] | None = None) -> bool:
        if params is None:
            if self._columns is not None and self._columns.hold:
                return False
            params = self.params
        try:
            changed = [param for param in params if param.refresh()]
        except BaseException:  # earlier parameters have already been refreshed
            self.forget_params()
            raise
        if changed:
            self._forget_plans()
        self._columns = None  # the gather that follows notes the new ones
        return bool(changed)

    @property
    def changed_since_gather(self) -> bool:
        """While sharded parameters are registered: whether one was written to, or replaced, since its last gather."""
        if self._columns is not None and self._columns.as_gathered:
            return False
        return any(param.changed_since_gather for param in self.params)

    def _register_unsharded(self) -> None:
        """After a gather: registers the unsharded parameters on the modules, creating them if needed.

        Notes the tensors that the parameters have now, which the next refresh compares with.
        """
        if self._columns is None or not self._columns.complete:
            for param in self.params:
                if param.unsharded_param is None or param.subclass is not None:
                    param.make_unsharded(param.sharded_param.requires_grad)
            self._columns = _Columns(self.params)
        self._columns.slots.register_unsharded()

    def _pass_on_freezing(self) -> None:
        """While unsharded parameters are registered: sharded ones may have been frozen, or trained again."""
        if self._columns is not None:
            self._columns.slots.pass_on_freezing()

    def _register_sharded(self) -> None:
        """Before the unsharded memory is freed: registers the sharded parameters on the modules."""
        assert self._columns is not None  # the gather has made them
        self._columns.slots.register_sharded()

    def _gather_sharded(self) -> Ticket | None:
        self._refresh()
        if not self._checked:
            for param in self.params:
                param.check_ready()
            self._share_shards(self.params)
            self._checked = True
        self.stale = False
        transport = self._chosen_transports().gather
        if self._items and not any(self._items):  # every parameter is its own shard
            self._drop_kept()
            return None
        sources = [param.sources() for param in self.params]
        self._drop_kept()
        if not self._items or self._has_subclass:
            items = [param.items(source) for param, source in zip(self.params, sources, strict=True)]
            if items != self._items:
                self._check_wire_sizes(items)
                self._plan, self._buffer_bytes, self._items = None, None, items
        if not any(self._items):
            return None
        lane = self.context.gathers
        flat_sources = [source for each in sources for source in each]
        read = flat_sources
        if self._offloaded:
            read = self.context.on_device(flat_sources, (item.dtype for each in self._items for item in each))
        with lane.owning_memory():
            with contextlib.nullcontext() if transport is None else transport.registered_memory():
                for param, items_of in zip(self.params, self._items, strict=True):
                    param.allocate(items_of)
            targets = [target for param in self.params for target in param.targets]
            if transport is not None and self._plan is None:
                self._plan = self._plan_sharded(transport)
            if self._plan is not None:
                program = self._plan.transport.gather(self._plan, read, targets)
            else:
                program = gather_alone(read, targets)
        if self._plan is None and not lane.has_streams:
            next(program, None)
            return None
        written = lane.has_streams and self._shards_written
        if written:
            self.context.wait_for_writers()
            self.settle_shards()
        # The inputs of fsdp_pre_all_gather are made on the current stream just before this.
        ticket = lane.start(program, self.label, flat_sources, after_current=written or self._has_subclass)
        if transport is not None and transport.peers_read_shards:
            self.context.note_read_by_peers(ticket, transport)
        return ticket

    @property
    def _shards_written(self) -> bool:
        """Whether the shards may have been written since the gather lane last waited for all writers."""
        return self._written or any(param.shard_written for param in self.params)

    def settle_shards(self) -> None:
        """Makes the gather lane wait for everything queued so far, so that later gathers need not."""
        self._written = False
        for param in self.params:
            param.settle_shard()

    def _check_wire_sizes(self, items: list[list[GatherItem]]) -> None:
        """Checks that ranks agree on the sizes that subclasses chose; different sizes would hang (collective).

        Raises:
            ValueError: on every rank of the shard group.
        """
        uneven = [
            (param, [(item.layout.numel, str(item.dtype)) for item in items_of])
            for param, items_of in zip(self.params, items, strict=True)
            if param.subclass is not None and param.layout.padded_numel != param.layout.numel
        ]
        if not uneven:
            return
        group = self.mesh.shard_group
        if group is None or self._chosen_transports().gather is None:
            return
        if agree(repr([sent for _, sent in uneven]).encode(), group, self.device):
            return
        param = uneven[0][0]
        assert param.subclass is not None
        shapes = [tuple(shape) for shape in param.subclass.input_shapes]
        raise ValueError(
            f"parameter '{param.fqn}' of shape {tuple(param.shape)} is sharded unevenly over {group.size()} ranks, and "
            f"its fsdp_pre_all_gather returned tensors of other sizes on other ranks, here {shapes}; pad them to "
            f"the size for a full chunk, {param.layout.padded_local_shape}"
        )

    def _gather_kept(self) -> Ticket:
        self._chosen_transports()  # for the reduction
        lane = self.context.gathers
        plan = self._plan_kept()
        with lane.owning_memory():
            with plan.transport.registered_memory():
                for param in self.params:
                    param.allocate([])
            sources = [part for param in self.params for part in param.kept]
            targets = [flat for param in self.params for flat in param.flats]
            program = plan.transport.gather(plan, sources, targets)
        # The lane has waited for the parts: they were copied before the memory was released.
        return lane.start(program, self.label, after_current=False)

    def _plan_kept(self) -> GatherPlan:
        smaller = self.post_forward_mesh
        assert smaller is not None
        if self._kept_plan is None:
            flats = [(param.fqn, flat) for param in self.params for flat in param.flats]
            items = [GatherItem(fqn, ChunkLayout((flat.numel(),), 0, smaller.size), flat.dtype) for fqn, flat in flats]
            transport = transport_for(smaller.group, self.device, self._communication.registered)
            self._kept_plan = plan_gather(items, transport, self.label, smaller.rank)
            self._buffer_bytes = None
        return self._kept_plan

    @property
    def _has_subclass(self) -> bool:
        if self._subclassed is None:
            self._subclassed = any(param.subclass for param in self.params)
        return self._subclassed

    def _drop_kept(self) -> None:
        if self.post_forward_mesh is not None:
            for param in self.params:
                param.kept.clear()


class _Columns:
    """The values that `FSDPParam.refresh` compares, in columns, so that C loops compare a whole group.

    They are rebuilt whenever a parameter may have been replaced. If a value differs, `refresh` checks each parameter.
    """

    def __init__(self, params: list[FSDPParam]) -> None:
        self.slots = Slots(
            (slot, param.sharded_param, param.unsharded_param) for param in params for slot in param.slots
        )
        self.complete = all(param.unsharded_param is not None and param.subclass is None for param in params)
        self.sharded = [param.sharded_param for param in params]
        self.copied = [param for param in params if not param.aliased]
        self.copied_from = [param.sharded_param for param in self.copied]
        self.locals = [param.held for param in params]
        compared = [param for param in params if param.subclass is None]  # the hooks of a subclass may change it
        self.attributes = [param.held.__dict__ for param in compared]
        unsharded = [(param, one) for param in compared if (one := param.unsharded_param) is not None]
        self.over_storage = self.sharded + [one for _, one in unsharded]
        self.storages = [*(param.origin for param in params), *(param.unsharded_origin for param, _ in unsharded)]
        gathered = [(param, one) for param, one in unsharded if not param.aliased]
        self.written_to = [one for _, one in gathered]
        self.versions = [param.unsharded_version for param, _ in gathered]

    @property
    def hold(self) -> bool:
        """Whether `refresh` would find no change and raise no error, for all parameters."""
        return (
            self.slots.hold
            and all(map(is_, map(local_of, self.sharded), self.locals))
            and all(map(is_, map(torch.Tensor.untyped_storage, self.over_storage), self.storages))
            and not any(map(contains, self.attributes, repeat(HOOK)))
            and [*map(version_of, self.written_to)] == self.versions
        )

    @property
    def as_gathered(self) -> bool:
        """Whether modules hold the sharded parameters, unchanged since their last gather."""
        return (
            self.slots.hold_sharded
            and all(map(is_, map(local_of, self.sharded), self.locals))
            and all(map(eq, map(version_of, self.copied_from), map(_gathered_version, self.copied)))
        )
