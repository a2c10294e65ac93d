"""How the parameters of a group are gathered: transports, plans, sources and targets of a gather, and its waits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from shardkit.core import events
from shardkit.core.engine.context import CommContext
from shardkit.core.engine.order_check import agree
from shardkit.core.engine.settings import Communication
from shardkit.core.mesh import DataParallelMesh, PostForwardMesh
from shardkit.core.parameters.param import FSDPParam
from shardkit.core.policies import CompressionPolicy
from shardkit.core.runtime.choice import Transports, may_share_memory, transport_for
from shardkit.core.runtime.collective import gather_alone
from shardkit.core.runtime.lanes import Ticket
from shardkit.core.runtime.plan import GatherItem, GatherPlan, Transport, plan_gather
from shardkit.core.runtime.sharding import ChunkLayout
from shardkit.core.runtime.shared.segment import shared_if_possible
from shardkit.core.torch_compat import versions_of

__all__ = ["GroupGather"]


class GroupGather:
    """The gather of one group's parameters, from the shards or from the parts that a smaller group keeps.

    Attributes:
        label: name of the group in messages.
        context: the lanes that it shares with the other groups of its root.
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
        self._communication = Communication(compression)
        self._transports: Transports | None = None  # chosen by the first gather
        self._transports_of: Communication | None = None  # that they were chosen for
        self._offloaded = any(param.offload is not None for param in params)
        self._versions: list[int] = []  # of the shards, when the gather lane last waited for their writers
        self._checked = False  # whether the parameters are where a gather needs them
        self._plan: GatherPlan | None = None
        self._items: list[list[GatherItem]] = []
        self._kept_plan: GatherPlan | None = None
        self._buffer_bytes: int | None = None
        self._parameter_bytes: int | None = None
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
        self.forget_plans()

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

    def forget_plans(self) -> None:
        """Forgets what was worked out from the parameters: they are others now, or their shards."""
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
        """Notes that an optimizer has stepped: fused and foreach kernels bump no version counter of a DTensor."""
        self._versions = []

    @property
    def written(self) -> bool:
        """Whether the shards were written to since their last gather, or since `note_ordered`."""
        return self._versions != self._current_versions()

    def note_ordered(self) -> None:
        """Notes that later gathers of the lane are ordered after all writes to the shards so far."""
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return versions_of([param.sharded_param for param in self.params])

    def _gather_sharded(self) -> Ticket | None:
        if not self._checked:
            for param in self.params:
                param.check_ready()
            self._checked = True
        before, self._versions = self._versions, self._current_versions()
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
        if written := before != self._versions:
            self.context.wait_for_writers()
        # The inputs of fsdp_pre_all_gather are made on the current stream just before this.
        ticket = lane.start(program, self.label, flat_sources, after_current=written or self._has_subclass)
        if transport is not None and transport.peers_read_shards:
            self.context.note_read_by_peers(ticket, transport)
        return ticket

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
