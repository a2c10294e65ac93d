"""A parameter group: parameters that are gathered and reduced together, and the lifecycle of their memory.

`unshard` starts a gather and returns (SHARDED, or KEPT, to GATHERING); `wait_for_unshard` finishes it and registers the
unsharded parameters on the modules (UNSHARDED). `reshard` registers the sharded ones and frees the memory (SHARDED, or
KEPT with this rank's part for a smaller group), or leaves it CACHED, to be taken back by the next `unshard` or freed
when others need room: room.py, Note [Room]. All three do nothing when there is nothing to do. `_MOVES` has all
transitions. Unsharded memory is freed by `free`, and by a parameter that gets another shard.

Note [Writers of shards]
Users, loads and optimizers write between iterations, gradient hooks when a reduction ends, jobs of beyond/ under the
next forward. A DTensor counts writes: `versions` are the counts at the last gather, cleared where a kernel may have
counted none, after an optimizer's step and after hooks. A gather that finds a write waits for the current stream and
for reductions in flight, the first of an iteration for all that was queued before, `before_gather` for jobs. Writers
wait, too: peers have read when the user gets control back (`wait_until_peers_have_read`), and an optimizer waits for a
gather under way (`check_step`). Other memory under a shard is found by the sweep.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch.autograd import profiler

from shardkit.core import events
from shardkit.core.engine import reduction
from shardkit.core.engine.schedule import Schedule
from shardkit.core.engine.settings import GroupSettings
from shardkit.core.mesh import DataParallelMesh, PostForwardMesh
from shardkit.core.parameters.gradients import check_gradients
from shardkit.core.parameters.param import FSDPParam, outside_inference
from shardkit.core.parameters.registration import (
    changed,
    pass_on_freezing,
    register_sharded,
    register_unsharded,
    take_over,
)
from shardkit.core.policies import CompressionPolicy, MixedPrecisionPolicy
from shardkit.core.runtime.choice import Communication, Transports, transport_for
from shardkit.core.runtime.collective import agree, gather_alone
from shardkit.core.runtime.lanes import Ticket
from shardkit.core.runtime.plan import GatherItem, GatherPlan, ReducePlan, plan_gather
from shardkit.core.runtime.sharding import ChunkLayout
from shardkit.core.runtime.shared.meeting import possible
from shardkit.core.runtime.shared.segment import shared_copies
from shardkit.core.runtime.storage import part_of
from shardkit.core.stock_names import GROUP_NAMES, answers_stock_names
from shardkit.core.torch_compat import (
    RESET_DROPS_GRADIENTS,
    current_backward,
    is_gloo_on_cpu,
    outside_transforms,
    set_grad_enabled,
    versions_of,
)

_LOG = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])


class Residence(enum.Enum):
    """The location of a group's parameters."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    UNSHARDED = enum.auto()
    CACHED = enum.auto()
    KEPT = enum.auto()

    __hash__ = object.__hash__  # enum's own is a call of Python's, in every transition


_UNSHARDED = frozenset({Residence.GATHERING, Residence.UNSHARDED})
_WITH_MEMORY = frozenset({*_UNSHARDED, Residence.CACHED})
# A gather that fails, or is abandoned, goes back to where it began. Memory is freed twice where a gather never began.
_MOVES = {
    Residence.SHARDED: {Residence.GATHERING, Residence.SHARDED},
    Residence.GATHERING: {Residence.UNSHARDED, Residence.SHARDED, Residence.KEPT},
    Residence.UNSHARDED: {Residence.CACHED, Residence.SHARDED, Residence.KEPT},
    Residence.CACHED: {Residence.GATHERING, Residence.SHARDED, Residence.KEPT},
    Residence.KEPT: {Residence.GATHERING, Residence.SHARDED, Residence.KEPT},
}


# Scripts that read profiles go by the ranges of stock.
_RANGES = {
    "_gather": "all_gather",
    "_gather_kept": "all_gather",
    "_wait_for_unshard": "all_gather_copy_out",
    "post_backward": "post_backward_reduce",
}


def _ungraphed(method: _F) -> _F:
    """Runs a method of a group without autograd, in a range "FSDP::all_gather (<fqn>)" or so while a profiler runs."""
    what = _RANGES.get(method.__name__, method.__name__)

    @functools.wraps(method)
    def run(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
        if getattr(profiler, "_is_profiler_enabled", False):
            with torch.profiler.record_function(f"FSDP::{what} ({group.label})"), torch.no_grad():
                return method(group, *args, **kwargs)
        before = torch.is_grad_enabled()  # `torch.no_grad()` costs three times the host time
        set_grad_enabled(False)
        try:
            return method(group, *args, **kwargs)
        finally:
            set_grad_enabled(before)

    return cast(_F, run)


@dataclass(frozen=True, eq=False)
class GatherPlans:
    """The plans of a group's gathers; after a load or a cast they are made again.

    Attributes:
        items: of each parameter; empty ones of a parameter that is its own shard.
        sharded: None for a single rank, or without items.
        kept: for the parts that a smaller group keeps, from its first gather on.
        has_subclass: whether a tensor subclass decides at each gather what is sent.
    """

    items: list[list[GatherItem]]
    sharded: GatherPlan | None
    has_subclass: bool
    kept: GatherPlan | None = None

    @functools.cached_property
    def buffer_bytes(self) -> int:
        """Bytes of a running gather besides the unsharded parameters."""
        plans = (plan for plan in (self.sharded, self.kept) if plan is not None)
        return max((plan.transport.gather_buffer_bytes(plan) for plan in plans), default=0)


def place_shards(group: FSDPParamGroup, params: Sequence[FSDPParam]) -> None:
    """Moves shards, just made or assigned, to pinned memory if offloaded, or to memory that peers on this host read."""
    if group.offloaded:
        _pin_together([param for param in params if param.pinned])
    over = group.mesh.shard_group
    if over is None or not is_gloo_on_cpu(over, group.device) or not possible():
        return
    shards = {param: shard for param in params if (shard := param.shard_to_share) is not None}
    for param, copy in zip(shards, shared_copies(list(shards.values())), strict=True):
        param.move_shard(copy)


def _pin_together(params: Sequence[FSDPParam]) -> None:
    """Moves shards on the host that are not pinned to one buffer for each dtype, so that they cross in one copy."""
    unpinned: dict[torch.dtype, list[FSDPParam]] = {}
    for param in params:
        shard = param.shard.tensor
        if type(shard) is torch.Tensor and shard.device.type == "cpu" and not shard.is_pinned():
            unpinned.setdefault(shard.dtype, []).append(param)
    with outside_inference():
        for dtype, together in unpinned.items():
            sizes = [param.shard.tensor.numel() for param in together]
            buffer = torch.empty(sum(sizes), dtype=dtype, device="cpu", pin_memory=True)
            for param, part in zip(together, buffer.split(sizes), strict=True):
                param.move_shard(part_of(buffer, part.view(param.shard.tensor.shape).copy_(param.shard.tensor)))


@answers_stock_names(GROUP_NAMES)
class FSDPParamGroup:
    """Parameters of one `fully_shard` call that share a mesh; arguments as the fields of `GroupSettings`.

    Attributes:
        device: that of unsharded parameters.
        ticket: the gather under way, or the one that filled the memory.
        users: the states that it belongs to; that of a tied parameter belongs to several.
        forward_users, backward_users: indices of those that are in forward or backward.
        was_left: whether the running backward has left it, and its gradients have been taken.
    """

    def __init__(
        self,
        params: list[FSDPParam],
        mesh: DataParallelMesh,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool,
        post_forward_mesh: PostForwardMesh | None,
        compression: CompressionPolicy | None = None,
    ) -> None:
        self.params = params
        for param in params:
            param.group = weakref.ref(self)
        self.mesh = mesh
        self.device = device
        self.label = ", ".join(param.fqn for param in params[:1])
        communication = Communication(compression)
        self.settings = GroupSettings(reshard_after_forward, mp_policy, post_forward_mesh, communication)
        self.schedule: Schedule  # set by its first user
        self.users: WeakSet[Any] = WeakSet()
        self.counts_toward_depth = mesh.shard_size > 1
        self.taken = 0  # of the room
        self.residence = Residence.SHARDED
        self.forward_users: set[int] = set()
        self.backward_users: set[int] = set()
        self.was_left = False
        self.prefetched = False
        self.held_by_user = False  # since an explicit unshard
        self.transports: Transports | None = None
        self._chosen_for: Communication | None = None  # the settings that the transports were chosen for
        self.plans: GatherPlans | None = None
        self.reduce_plans: dict[tuple[Any, ...], ReducePlan] = {}
        self.offloaded = any(param.offload is not None for param in params)
        self.kept: list[torch.Tensor] = []  # this rank's parts of the flats, for backward's gather over a smaller group
        self.cast_shards: torch.Tensor | None = None  # offloaded, as a step left them, in the dtype of gathers
        self.before_gather: list[Callable[[], None]] = []  # called before each: a step on the shards is waited for
        self.when_delivered: list[Callable[[Sequence[FSDPParam]], None]] = []  # called when gradients are reduced
        self.versions: list[int] = []  # of the shards, when the gather lane last waited for their writers
        self.ticket: Ticket | None = None
        self._readers: tuple[Any, ...] = ()  # events of the readers of CACHED memory
        self._accumulating = False  # whether backwards without sync have left gradients
        self._reducing: list[Ticket] = []  # of its last reduction
        place_shards(self, self.params)

    @staticmethod
    def of(param: FSDPParam) -> FSDPParamGroup:
        group = param.group() if param.group is not None else None
        assert isinstance(group, FSDPParamGroup), param.fqn
        return group

    def split_off(self, param: FSDPParam) -> FSDPParamGroup:
        """Moves a parameter into a new group with the same settings; call it before anything is gathered."""
        assert self.residence is Residence.SHARDED, self.label
        self.params.remove(param)
        self.plans = None
        group = FSDPParamGroup([param], self.mesh, self.device, self.mp_policy, True, None)
        group.settings = self.settings
        return group

    def change(self, **settings: Any) -> None:
        """Changes some settings, from the next gather or reduction on."""
        if self.residence is Residence.KEPT and "post_forward_mesh" in settings:
            self.reshard()
        self.settings = replace(self.settings, **settings)
        if "communication" in settings:
            self.plans = None
        if "keep_unsharded_storage" in settings and self.residence not in _WITH_MEMORY:
            self.free()  # memory that was kept so far

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The dtypes of parameters and gradients (stock's name)."""
        return self.settings.mp_policy

    def set_mixed_precision(self, policy: MixedPrecisionPolicy) -> None:
        """Sets the dtypes of parameters and gradients from the next gather on; call it between iterations."""
        self.reshard()
        self.settings = replace(self.settings, mp_policy=policy)
        self._accumulating = self._accumulating or self.has_gradients
        for param in self.params:
            param.set_mixed_precision(policy)
        self.plans = None

    # -- how much memory it takes --------------------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        """Whether a forward, a backward or the user requires it to stay as it is."""
        return bool(self.forward_users or self.backward_users or self.held_by_user)

    @property
    def is_unsharded(self) -> bool:
        """Whether it is gathered, or being gathered; stock's `is_unsharded` is False until a wait."""
        return self.residence in _UNSHARDED

    @property
    def unsharded_bytes(self) -> int:
        return sum(param.unsharded_bytes for param in self.params)

    def bytes_when_used(self, *, in_backward: bool) -> int:
        """Bytes that its next gather takes, and then its parameters; collective until there are plans.

        The size that a tensor subclass sends is known after its first gather; until then the parameter's size counts.
        """
        transports, plans = self._prepare(from_kept=in_backward and self.residence is Residence.KEPT)
        return self.unsharded_bytes + (0 if transports.gather is None else plans.buffer_bytes)

    # -- unshard and reshard -------------------------------------------------------------------------------------------

    def _move_to(self, residence: Residence) -> None:
        assert residence in _MOVES[self.residence], f"{self.label}: {self.residence} -> {residence}"
        self.residence = residence

    @outside_transforms
    def unshard(self, *, in_backward: bool = False, ahead: bool = False) -> bool:
        """Starts gathering the parameters (collective over the shard group), or takes back CACHED memory.

        Forward gathers the sharded parameters, and again if they were written to since the last gather began, as by a
        step after a forward without a backward; only backward uses the parts kept after forward. False if it was to be
        gathered `ahead` of use, and there is no room.
        """
        room = self.schedule.room
        if self.residence in _WITH_MEMORY:
            # Backward must read what forward has read, also if the shards were written to since.
            if in_backward or not self.written:
                room.uncache(self)
                if self.residence is Residence.CACHED:
                    self._move_to(Residence.GATHERING)  # already filled: a wait has only to register it
                return True
            self.reshard()
        if not room.take(self, in_backward=in_backward, ahead=ahead):
            return False
        if not in_backward:  # a backward gathers the casts again: it reads what its forward has read
            self.cast_shards = None
        try:
            for call in [*self.before_gather]:
                call()
            if (check := self.schedule.order_check) is not None:
                self.schedule.context.catch_up()
                check.record("all-gather", self.label, self.mesh.shard_group, self.device)
            from_kept = in_backward and self.residence is Residence.KEPT
            self.ticket = self._gather_kept() if from_kept else self._gather()
        except BaseException:  # Ctrl-C included: room is taken, and some storages may have their memory already
            self.free()
            raise
        self._move_to(Residence.GATHERING)
        return True

    @property
    def written(self) -> bool:
        """Whether the shards were written to since the lane last waited for writers: Note [Writers of shards]."""
        return self.versions != versions_of([param.sharded_param for param in self.params])

    @outside_transforms
    def wait_for_unshard(self) -> None:
        """Waits for a started gather, each stream that computes for itself; registers the unsharded parameters."""
        if self.residence is Residence.GATHERING:
            self._wait_for_unshard()
        elif self.residence is Residence.UNSHARDED:
            pass_on_freezing(self.params)
            if self.ticket is not None:  # another stream may have waited, and not this one
                self.ticket.wait()

    @_ungraphed
    def _wait_for_unshard(self) -> None:
        self._end_gather()
        self.kept.clear()  # not before: a gather in flight reads them
        register_unsharded(self.params)
        self._move_to(Residence.UNSHARDED)
        if (room := self.schedule.room).by_bytes:
            room.charge(self, self.unsharded_bytes)  # the gather's packed buffer has gone

    def _end_gather(self) -> None:
        """If the gather fails, its memory is freed."""
        if self.ticket is not None:
            try:
                self.ticket.wait()
            except BaseException:
                ticket, self.ticket = self.ticket, None  # which nobody has read
                ticket.abandon()  # after Ctrl-C transfers may still write to memory that is freed here
                self.free()
                raise

    @outside_transforms
    def sweep(self, *, loading: bool = False) -> None:
        """Takes over what the user has changed, and frees memory that is out of date.

        See registration.py, Note [One sweep]. Does nothing while a forward or backward uses the group. Raises
        RuntimeError or ValueError for a change that cannot be taken over. `loading`: after a load, a cast or a move.
        """
        if self.forward_users or self.backward_users:
            return
        found = changed(self.params)
        if self.residence is not Residence.SHARDED and (found or self.written):
            self.reshard()
        if found:
            self.plans = None
            place_shards(self, [param for param in found if take_over(param, loading=loading)])

    @outside_transforms
    def reshard(self, *, keep: bool = False, cache: bool = False, for_backward: bool = False) -> None:
        """Registers the sharded parameters and frees the unsharded ones.

        With `keep`, this rank's part for a smaller group is kept, if there is one. With `cache` the memory stays until
        another gather needs it, if that is possible; `for_backward` if backward will use it.
        """
        if self.residence is Residence.SHARDED or (cache and self.residence is Residence.CACHED):
            return
        self.prefetched = self.held_by_user = False
        if self.residence is Residence.GATHERING:
            self._end_gather()  # transfers write to the memory that is freed below
        register_sharded(self.params)
        unsharded = self.residence is Residence.UNSHARDED
        self.kept.clear()
        if keep and unsharded and (smaller := self.settings.post_forward_mesh) is not None:
            with torch.no_grad():
                flats = (flat for param in self.params for flat in param.flats)
                self.kept.extend(flat.chunk(smaller.size)[smaller.rank].clone() for flat in flats)
        cache = cache and unsharded and self.plans is not None and not self.plans.has_subclass
        if cache and self.schedule.room.cache(self, for_backward=for_backward):
            # Now, not when the memory is freed: that waits for these readers and for nothing that runs after them.
            self._readers = () if self.ticket is None else self.ticket.reader_events()
            self._move_to(Residence.CACHED)
        else:
            self.free()

    def free(self) -> None:
        """Frees the memory of unsharded parameters. Their module has registered the sharded ones before.

        The memory belongs to the gather lane, which first waits for the streams that have read it; the next gather may
        take it over at once: lanes.py, Note [Who owns memory].
        """
        readers = self._readers
        if self.residence is not Residence.CACHED and self.ticket is not None:
            readers = self.ticket.reader_events()
        for event in readers:
            self.schedule.context.gathers.wait_event(event)
        self.ticket, self._readers = None, ()
        if not self.settings.keep_unsharded_storage:
            for param in self.params:
                param.free()
        self._move_to(Residence.KEPT if self.kept else Residence.SHARDED)
        self.schedule.room.uncache(self)
        self.schedule.room.charge(self, 0)

    # -- gathers -------------------------------------------------------------------------------------------------------

    def _prepare(self, *, from_kept: bool = False) -> tuple[Transports, GatherPlans]:
        """The transports and plans, made by the first gather after a change; then ranks of the shard group meet."""
        communication = self.settings.communication
        if self.transports is None or self._chosen_for is not communication:
            with events.waiting(self.label, "set-up"):
                self.transports = communication.transports(self.mesh.shard_group, self.device, self.label)
            self._chosen_for = communication
            names = [None if one is None else one.name for one in (self.transports.gather, self.transports.reduce)]
            _LOG.debug("%s: gathers through %s, reduces through %s", self.label, *names)
        if self.plans is None:
            for param in self.params:
                param.check_ready()
            has_subclass = any(param.shard.subclass for param in self.params)
            sent = [] if has_subclass else [param.items([]) for param in self.params]
            self._plan(self.transports, sent, has_subclass)
        assert self.plans is not None
        if from_kept and self.plans.kept is None:
            smaller = self.settings.post_forward_mesh
            assert smaller is not None
            flats = [(param.fqn, flat) for param in self.params for flat in param.flats]
            items = [GatherItem(fqn, ChunkLayout((flat.numel(),), 0, smaller.size), flat.dtype) for fqn, flat in flats]
            transport = transport_for(smaller.group, self.device, communication.registered)
            self.plans = replace(self.plans, kept=plan_gather(items, transport, self.label, smaller.rank))
        return self.transports, self.plans

    def _plan(self, transports: Transports, items: list[list[GatherItem]], has_subclass: bool) -> None:
        plan, sent = None, [item for each in items for item in each]
        if transports.gather is not None and sent:
            plan = plan_gather(sent, transports.gather, self.label, self.mesh.shard_rank)
        self.plans = GatherPlans(items, plan, has_subclass)

    @_ungraphed
    def _gather(self) -> Ticket | None:
        """Starts a gather from the shards; None if there is nothing to wait for."""
        params = self.params
        transports, plans = self._prepare()
        before, self.versions = self.versions, versions_of([param.sharded_param for param in params])
        self.kept.clear()  # forward gathers the shards
        inputs = [param.sources() for param in params]
        if plans.has_subclass:
            items = [param.items(sources) for param, sources in zip(params, inputs, strict=True)]
            if items != plans.items:
                self._check_wire_sizes(transports, items)
                self._plan(transports, items, has_subclass=True)
                plans = cast(GatherPlans, self.plans)
        sources = [source for each in inputs for source in each]
        if not sources:  # every parameter is its own shard
            return None
        context = self.schedule.context
        lane, transport = context.gathers, transports.gather
        read = sources
        if self.offloaded:
            dtypes = [item.dtype for each in plans.items for item in each]
            read = context.on_device(sources, dtypes, self.cast_shards)
        # The lane owns the memory: it frees and allocates in its own order, and need not wait for the compute stream.
        with lane.owning_memory():
            with contextlib.nullcontext() if transport is None else transport.registered_memory():
                items_of = zip(params, plans.items, strict=True)
                targets = [flat for param, items in items_of for flat in param.allocate(items)]
            if plans.sharded is not None:
                program = plans.sharded.transport.gather(plans.sharded, read, targets)
            else:
                program = gather_alone(read, targets)
        if plans.sharded is None and not lane.has_streams:  # a single rank on a CPU: a copy, which ends here
            next(program, None)
            return None
        # The lane waits for the current stream only if that has written to the shards: everything that computes would
        # delay the gather. The inputs of fsdp_pre_all_gather are always made there, just before this.
        if (written := before != self.versions) and lane.has_streams:
            context.wait_for_writers()
        ticket = lane.start(program, self.label, sources, after_current=written or plans.has_subclass)
        if transport is not None and transport.peers_read_shards:
            context.note_read_by_peers(ticket, transport)
        return ticket

    def _check_wire_sizes(self, transports: Transports, items: list[list[GatherItem]]) -> None:
        """Raises ValueError on every rank if subclasses chose different sizes, which would hang (collective)."""
        uneven = [
            (param, [(item.layout.numel, str(item.dtype)) for item in items_of])
            for param, items_of in zip(self.params, items, strict=True)
            if param.shard.subclass is not None and param.layout.padded_numel != param.layout.numel
        ]
        over = self.mesh.shard_group
        if not uneven or over is None or transports.gather is None:
            return
        if agree(repr([sent for _, sent in uneven]).encode(), over, self.device):
            return
        param = uneven[0][0]
        assert param.shard.subclass is not None
        shapes = [layout.padded_local_shape for layout in param.shard.subclass.layouts]
        raise ValueError(
            f"parameter '{param.fqn}' of shape {tuple(param.shape)} is sharded unevenly over {over.size()} ranks, and "
            f"its fsdp_pre_all_gather returned tensors of other sizes on other ranks, here {shapes}; pad them to "
            f"the size for a full chunk, {param.layout.padded_local_shape}"
        )

    @_ungraphed
    def _gather_kept(self) -> Ticket:
        """Starts a gather from the parts that a smaller group keeps."""
        _, plans = self._prepare(from_kept=True)  # transports of the reduction, too
        assert plans.kept is not None
        transport, lane = plans.kept.transport, self.schedule.context.gathers
        with lane.owning_memory():
            with transport.registered_memory():
                targets = [flat for param in self.params for flat in param.allocate([])]
            program = transport.gather(plans.kept, [*self.kept], targets)
        # The lane has waited for the parts: they were copied before the memory was freed.
        return lane.start(program, self.label, after_current=False)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Backward is about to read the gathered parameters."""
        for param in self.params:
            if param.may_defer:
                param.defer_cast(will_reduce=self.settings.reduce_grads)

    @outside_transforms
    @_ungraphed
    def post_backward(self, *, stays: bool = False, cache: bool = False) -> None:
        """Reshards, and starts reducing the gradients that backward left (collective over the shard group). Idempotent.

        With `stays` the parameters stay unsharded: another backward will read them through this one's graph. With
        `cache` their memory stays until another gather, or the reduction, needs it.
        """
        self.was_left = True
        reduces, params, gradients = self.settings.reduce_grads, list[FSDPParam](), list[torch.Tensor]()
        if reduces:
            params, gradients = reduction.take_gradients(self.params, self.settings, alike=self._accumulating)
        else:
            for param in self.params:
                param.accumulate_unsharded()
        self._accumulating = not reduces
        for param in self.params:
            if param.may_defer:
                param.end_deferring()
        # Before the reduction, which takes memory: the parameters' is there for it, or for the next gather.
        self.reshard_after_use(stays=stays, cache=cache)
        if gradients:
            self._reduce(params, gradients, self.settings)

    @outside_transforms
    @_ungraphed
    def synchronize_gradients(self) -> None:
        """Reduces all gradients that wait for it, whatever the settings are (collective)."""
        if self._accumulating or self.has_gradients or self.has_partial:
            settings = replace(self.settings, reduce_grads=True, all_reduce_grads=True)
            params, gradients = reduction.take_gradients(self.params, settings, alike=self._accumulating)
            self._accumulating = False
            if gradients:
                self._reduce(params, gradients, settings)

    def _reduce(self, params: list[FSDPParam], gradients: list[torch.Tensor], settings: GroupSettings) -> None:
        context = self.schedule.context
        if (check := self.schedule.order_check) is not None:
            context.catch_up()
            label = ", ".join(param.fqn for param in params)
            check.record("reduce-scatter", label, self.mesh.shard_group, self.device)
            if settings.all_reduce_grads and settings.native_all_reduce:
                for replicas in self.mesh.replicate_groups:
                    check.record("all-reduce", label, replicas, self.device)
        assert self.transports is not None, self.label  # a gather came before
        transport = self.transports.reduce
        if self.offloaded and any(param.pinned for param in params):
            context.copies_to_pinned = True
        for ticket in self._reducing:
            if not ticket.done:  # its backward was not the last: as in stock, sums do not pile up
                ticket.wait()
        self._reducing.clear()
        for bucket in reduction.buckets(self, params, gradients, transport, settings):
            make = functools.partial(reduction.program, self, bucket, transport, settings)
            self._reducing.append(context.reduce(make, self.label, settings.max_reduce_inputs))

    def finalize_backward(self) -> None:
        """After all backwards of a step: reduces remaining gradients, if gradient sync is on by now, and reshards."""
        if self._accumulating or self.has_gradients or (self.has_partial and self.settings.all_reduce_grads):
            self.post_backward()
            self.was_left = False
        else:
            self.reshard_after_use(stays=False)

    def reshard_after_use(self, *, stays: bool, cache: bool = False) -> None:
        """After backward: reshards as configured, and makes room for a reduction."""
        if self.settings.reshard_after_backward and not (self.forward_users or self.prefetched or stays):
            self.reshard(cache=cache)
        self.schedule.room.make_room()  # it takes memory before the next gather does

    @property
    def has_gradients(self) -> bool:
        """Whether backward has left unsharded gradients that nobody has taken."""
        return any(getattr(param.unsharded_param, "grad", None) is not None for param in self.params)

    @property
    def has_partial(self) -> bool:
        """HSDP: whether a sum over the shard group waits for its all-reduce."""
        return bool(self.mesh.replicate_axes) and any(param.partial is not None for param in self.params)

    def check_step(self) -> list[FSDPParam]:
        """Before an optimizer steps: waits for readers of the shards; raises if it would miss a gradient.

        Returns the parameters with gradients that an earlier backward has left unreduced, or summed over shards only.
        """
        schedule = self.schedule
        if schedule.context.finalization is not None:
            raise RuntimeError(
                f"an optimizer steps while the gradients of '{self.label}' are being reduced; call wait() on the "
                "handle of finalize_backward(async_op=True) first"
            )
        if current_backward() == -1:
            if schedule.forward is not None or schedule.backward is not None:
                schedule.refuse_unended("an optimizer steps")
            if self.residence is Residence.GATHERING and self.ticket is not None:
                self.ticket.wait()  # a gather under way reads the shards, and so do peers
                schedule.context.wait_until_peers_have_read()
                if self.offloaded and schedule.context.gathers.has_streams:  # and copies do, which the host overtakes
                    torch.get_device_module(self.device).current_stream().synchronize()
        check_gradients(self.params)
        if self._accumulating or not self.settings.reduce_grads or self.backward_users or self.was_left:
            missed = None
        else:
            missed = next((one for one in self.params if getattr(one.unsharded_param, "grad", None) is not None), None)
        if missed is not None:
            raise RuntimeError(
                f"the gradient of parameter '{missed.fqn}' was not reduced: backward entered '{self.label}' through "
                "a tensor that is neither an output of a sharded module nor kept on one. Return the tensor from "
                "the module's forward, or set it as an attribute of the module"
            )
        if not self._accumulating and not self.mesh.replicate_axes:
            return []
        return [param for param in self.params if any(one is not None for one in param.pending)]

    def abandon(self) -> None:
        """Recovery: abandons a gather in flight, reshards, and drops unsharded gradients and partial sums."""
        if self.residence is Residence.GATHERING and self.ticket is not None:
            self.ticket.abandon()
        self.forward_users.clear()
        self.backward_users.clear()
        self.reshard()
        self._accumulating = False
        for param in self.params:
            param.forget_gradients()
            if RESET_DROPS_GRADIENTS:
                param.sharded_param.grad = None
        self.was_left = False
