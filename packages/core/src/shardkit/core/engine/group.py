"""A parameter group: parameters that are gathered and reduced together, and the lifecycle of their memory.

               unshard                wait
    SHARDED ------------> GATHERING ----------> UNSHARDED
       ^  ^                   ^                  |  |  |
       |  |                   | unshard          |  |  | reshard(keep=True)
       |  |                   '--- RELEASED <----'  |  v
       |  '------------- reshard -------------------' KEPT    (this rank's part for a smaller group)

`unshard` starts a gather and returns; `wait_for_unshard` finishes it and registers the unsharded parameters on the
modules; `reshard` registers the sharded ones and frees the memory, or releases it: room.py, Note [Room].
All three do nothing when there is nothing to do.
"""

from __future__ import annotations

import enum
import weakref
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, is_not
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.autograd import profiler

from shardkit.core import events
from shardkit.core.engine.gather import GroupGather
from shardkit.core.engine.order_check import OrderCheck
from shardkit.core.engine.reduction import GradientReduction
from shardkit.core.engine.room import Room
from shardkit.core.engine.settings import GroupSettings
from shardkit.core.engine.timetable import Prefetch
from shardkit.core.mesh import DataParallelMesh, PostForwardMesh
from shardkit.core.parameters.param import FSDPParam
from shardkit.core.parameters.registration import (
    changed,
    pass_on_freezing,
    register_sharded,
    register_unsharded,
    take_over,
)
from shardkit.core.policies import CompressionPolicy, MixedPrecisionPolicy
from shardkit.core.runtime.lanes import Ticket
from shardkit.core.stock_names import answers_stock_names
from shardkit.core.torch_compat import in_backward, outside_transforms, set_grad_enabled

__all__ = ["FSDPParamGroup", "GroupUser", "Phase", "Residence"]

# For C loops over a group's parameters in every step.
_flats_of = attrgetter("flats")
_may_defer = attrgetter("gradient_dtype.may_defer")
_unsharded_of = attrgetter("unsharded_param")


class GroupUser(Protocol):
    """A state that gathers and reshards groups; `index` is its place among those of its root."""

    index: int
    groups: list[FSDPParamGroup]

    def refuse_unended(self, what: str, *, inside: bool = False) -> None:
        """Raises if a forward or a backward of its root has not ended."""

    def add_group(self, group: FSDPParamGroup) -> None:
        """Makes the user gather and reshard `group` as well."""


class Residence(enum.Enum):
    """The location of a group's parameters."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    UNSHARDED = enum.auto()
    RELEASED = enum.auto()
    KEPT = enum.auto()


class Phase(enum.Enum):
    """The activity of a group or a state in this iteration."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    PRE_BACKWARD = enum.auto()
    POST_BACKWARD = enum.auto()


class ungraphed:  # noqa: N801 - a context manager, like torch.no_grad
    """Runs a block without autograd, in a range "shardkit::<what> (<fqn>)" while a profiler runs.

    It replaces `torch.no_grad()`, which costs three times the host time, because groups enter it several times a step.
    """

    def __init__(self, what: str, fqn: str) -> None:
        self._range: Any = None
        if getattr(profiler, "_is_profiler_enabled", False):
            self._range = torch.profiler.record_function(f"shardkit::{what} ({fqn})")

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()
        self._before = torch.is_grad_enabled()
        set_grad_enabled(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_grad_enabled(self._before)
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)


@answers_stock_names("group")
class FSDPParamGroup(GroupGather):
    """Parameters of one `fully_shard` call that share a mesh.

    Args:
        params: the parameters.
        mesh: their data-parallel mesh.
        device: device of unsharded parameters.
        mp_policy: dtypes of compute and reduction.
        reshard_after_forward: whether forward frees the parameters.
        post_forward_mesh: the subgroup that holds the parameters between forward and backward, or None.
        compression: how parameters and gradients are rounded when sent, None for full precision.
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
        super().__init__(params, mesh, device, post_forward_mesh, compression)
        for param in params:
            param.group = weakref.ref(self)
        self.mp_policy = mp_policy
        self.settings = GroupSettings(reshard_after_forward)
        self.users: WeakSet[GroupUser] = WeakSet()
        self.order_check: OrderCheck | None = None
        self.room = Room(Prefetch())
        self.taken = 0
        self.residence = Residence.SHARDED
        self.phase = Phase.IDLE
        # Bookkeeping of states and of the iteration: several states use a group when it holds a tied parameter.
        self.counts_toward_depth = mesh.shard_size > 1
        self.prefetched = False
        self.forward_users = 0
        self.backward_users: set[int] = set()
        self.held_by_user = False  # since an explicit unshard
        self._accumulating = False
        self._reduction = GradientReduction(mesh, self.params)
        self._reducing: list[Ticket] = []
        self._ticket: Ticket | None = None  # of the gather under way
        self._gathered: Ticket | None = None  # of the gather that filled the memory
        self._readers: tuple[Any, ...] = ()  # events of the readers of released memory

    @staticmethod
    def of(param: FSDPParam) -> FSDPParamGroup:
        """The group of a parameter."""
        group = param.group() if param.group is not None else None
        assert isinstance(group, FSDPParamGroup), param.fqn
        return group

    def split_off(self, param: FSDPParam) -> FSDPParamGroup:
        """Moves a parameter into a new group with the same settings; call it before anything is gathered."""
        assert self.residence is Residence.SHARDED, self.label
        self.params.remove(param)
        self.forget_plans()
        group = FSDPParamGroup(
            [param],
            self.mesh,
            self.device,
            self.mp_policy,
            self.settings.reshard_after_forward,
            self.post_forward_mesh,
        )
        group.settings = self.settings
        group.communication = self.communication
        return group

    def change(self, **settings: Any) -> None:
        """Changes some settings, from the next gather or reduction on."""
        self.settings = replace(self.settings, **settings)
        if "keep_unsharded_storage" in settings and not self.has_memory:  # its memory may have been kept so far
            self._free_storage()

    def set_mixed_precision(self, policy: MixedPrecisionPolicy) -> None:
        """Sets the dtypes of parameters and gradients from the next gather on; call it between iterations."""
        self.reshard()
        self.mp_policy = policy
        self._accumulating = self._accumulating or self.has_gradients
        for param in self.params:
            param.set_mixed_precision(policy)
        self.forget_plans()

    # -- how much memory it takes --------------------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        """Whether a forward, a backward or the user requires it to stay as it is."""
        return bool(self.forward_users or self.backward_users or self.held_by_user)

    def bytes_when_used(self, *, in_backward: bool) -> int:
        """Bytes that the gather takes that its next use needs.

        The size that a tensor subclass sends is known after its first gather; until then the parameter's size counts.
        """
        if self.residence is Residence.KEPT and in_backward:
            self._plan_kept()
        return self._gather_bytes

    def report_use(self) -> None:
        """Tells tools whether the group had been prefetched for this use, or kept since its last use."""
        if events.hub.active:
            events.emit((events.PrefetchHit if self.has_memory else events.PrefetchMiss)(self.label))

    # -- unshard and reshard -------------------------------------------------------------------------------------------

    @property
    def is_unsharded(self) -> bool:
        """Whether unsharded memory is held: gathered, or being gathered."""
        return self.residence is Residence.GATHERING or self.residence is Residence.UNSHARDED

    @property
    def has_memory(self) -> bool:
        """`is_unsharded`, or whether it was released and its memory still exists."""
        return self.is_unsharded or self.residence is Residence.RELEASED

    @outside_transforms
    def unshard(self, *, in_backward: bool = False, ahead: bool = False) -> bool:
        """Starts gathering the parameters (collective over the shard group). No-op if the gather has started.

        In forward the gather starts from the sharded parameters, which an optimizer or a load may have changed; only
        backward uses the parts kept after forward. For the same reason forward gathers again if they were written to
        since the last gather began, for example by a step after a forward without a backward. Released memory is taken
        back.

        Returns:
            False if it was to be gathered `ahead` of use, and there is no room.
        """
        if self.has_memory:
            if in_backward or not self.written:
                self.room.take_back(self)
                if self.residence is Residence.RELEASED:
                    self.residence = Residence.GATHERING
                return True
            self.reshard()
        if not self.room.take(self, in_backward=in_backward, ahead=ahead):
            return False
        with ungraphed("unshard", self.label):
            from_kept = in_backward and self.residence is Residence.KEPT
            if self.order_check is not None:
                self.context.catch_up()
                self.order_check.record("all-gather", self.label, self.mesh.shard_group, self.device)
            try:
                self._ticket = self._gather_kept() if from_kept else self._gather_sharded()
            except BaseException:
                self._free()
                raise
        self.residence = Residence.GATHERING
        return True

    @outside_transforms
    def sweep(self, *, loading: bool = False) -> None:
        """Takes over what the user has changed, and frees memory that is out of date.

        See registration.py, Note [One sweep]. Does nothing while a forward or backward uses the group. After a load, a
        cast or a move (`loading`), tensors that the user derives from local tensors share the shards' memory.

        Raises:
            RuntimeError, ValueError: for a change that cannot be taken over, with the FQN.
        """
        if self.forward_users or self.backward_users:
            return
        found = changed(self.params)
        if self.residence is not Residence.SHARDED and (found or self.written):
            self.reshard()
        if found:
            self.forget_plans()
            self._share_shards([param for param in found if take_over(param, loading=loading)])

    @outside_transforms
    def wait_for_unshard(self) -> None:
        """Waits for a started gather and registers the unsharded parameters. No-op if none was started.

        Every forward and backward calls this before it uses the parameters. On streams the current stream waits, even
        if another one has already waited.
        """
        if self.residence is not Residence.GATHERING:
            if self.residence is Residence.UNSHARDED:
                pass_on_freezing(self.params)
                if self._gathered is not None:
                    self._gathered.wait()
            return
        with ungraphed("wait_for_unshard", self.label):
            if self._ticket is None and self._gathered is not None:  # taken back: this stream may not have waited yet
                self._gathered.wait()
            self._end_gather()
            self._drop_kept()
            register_unsharded(self.params)
            if self._has_subclass:
                self._parameter_bytes = None
        self.residence = Residence.UNSHARDED
        self.room.note_gathered(self)

    @outside_transforms
    def reshard(self, *, keep: bool = False, release: bool = False, awaited: bool = False) -> None:
        """Registers the sharded parameters and frees the unsharded ones.

        With `keep`, and a smaller group to reshard to, this rank's part for that group is kept. With `release` the
        memory is kept until another gather needs it, if that is possible; `awaited` if backward will use it.
        """
        if self.residence is Residence.SHARDED:
            return
        if self.residence is Residence.RELEASED:
            if release:
                return
            self.free_idle()
        self.prefetched = self.held_by_user = False
        release = release and self.room.may_release(self) and not self._has_subclass
        self._end_gather()
        was_unsharded = self.residence is Residence.UNSHARDED
        self.residence = Residence.SHARDED
        register_sharded(self.params)
        if was_unsharded and keep and self.post_forward_mesh is not None:
            smaller = self.post_forward_mesh
            with torch.no_grad():
                for param in self.params:
                    param.keep_part(smaller.size, smaller.rank)
            self.residence = Residence.KEPT
        else:
            self._drop_kept()
        if release and was_unsharded:
            self.residence = Residence.RELEASED
            self._readers = self._reader_events()
            self.room.release(self, awaited=awaited)
            return
        self._free()

    def free_idle(self) -> None:
        """Frees the memory of a group that is not in use; what is kept for a smaller group stays."""
        if self.residence is not Residence.RELEASED:
            self.reshard()
            return
        keeps = self.post_forward_mesh is not None and any(param.kept for param in self.params)
        self.residence = Residence.KEPT if keeps else Residence.SHARDED
        self._free_after(self._readers)

    def _free_storage(self) -> None:
        if not self.settings.keep_unsharded_storage:
            for param in self.params if self._has_subclass else filter(_flats_of, self.params):
                param.free()

    def _end_gather(self) -> None:
        """Waits for the gather in flight, if there is one. If it fails, the group stays sharded."""
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        try:
            ticket.wait()
        except BaseException:
            ticket.abandon()  # after Ctrl-C transfers may still write to memory that is freed here
            self.residence = Residence.SHARDED
            self._free()
            raise
        self._gathered = ticket

    def _reader_events(self) -> tuple[Any, ...]:
        return () if self._gathered is None else self._gathered.reader_events()

    def _free(self) -> None:
        self._free_after(self._reader_events())

    def _free_after(self, readers: tuple[Any, ...]) -> None:
        for event in readers:
            self.context.gathers.wait_event(event)
        self._gathered, self._readers = None, ()
        self._free_storage()
        self.room.give_back(self)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Call when the parameters are gathered and a backward is about to read them."""
        for param in filter(_may_defer, self.params):
            param.defer_cast(will_reduce=self.settings.reduce_grads)

    @outside_transforms
    def post_backward(self, *, keep: bool = False, release: bool = False) -> None:
        """Reshards, and starts reducing the gradients that backward left (collective over the shard group). Idempotent.

        With `keep` the parameters stay unsharded: another backward will read them through this one's graph. With
        `release` their memory is kept until another gather, or the reduction, needs it.
        """
        self.phase = Phase.POST_BACKWARD
        with ungraphed("post_backward", self.label):
            if not self.settings.reduce_grads:
                self._accumulating = True
                for param in self.params:
                    param.accumulate_unsharded()
                self._end_deferring()
                self.reshard_after_use(keep=keep, release=release)
                return
            params, gradients = self._take_gradients(self.settings)
            self._end_deferring()
            self.reshard_after_use(keep=keep, release=release)
            self._reduce(params, gradients, self.settings)

    @outside_transforms
    def synchronize_gradients(self) -> None:
        """Reduces all gradients that have yet to be reduced, whatever the settings are (collective)."""
        if self._accumulating or self.has_gradients or self._reduction.has_partial:
            settings = replace(self.settings, reduce_grads=True, all_reduce_grads=True)
            with ungraphed("synchronize_gradients", self.label):
                self._reduce(*self._take_gradients(settings), settings)

    def _take_gradients(self, settings: GroupSettings) -> tuple[list[FSDPParam], list[torch.Tensor]]:
        params, gradients = self._reduction.take_gradients(settings, alike=self._accumulating)
        self._accumulating = False
        return params, gradients

    def _end_deferring(self) -> None:
        for param in filter(_may_defer, self.params):
            param.end_deferring()

    def finalize_backward(self) -> None:
        """After all backwards of a step: reduces remaining gradients, if gradient sync is on by now, and reshards."""
        if self._accumulating or self.has_gradients or (self._reduction.has_partial and self.settings.all_reduce_grads):
            self.post_backward()
            self.phase = Phase.IDLE
        else:
            self.reshard_after_use(keep=False)

    def reshard_after_use(self, *, keep: bool, release: bool = False) -> None:
        """Reshards when backward no longer needs the parameters."""
        if self.settings.reshard_after_backward and not (self.forward_users or self.prefetched or keep):
            self.reshard(release=release)
        self.room.make_room()  # a reduction follows, and takes memory before the next gather does

    @property
    def has_gradients(self) -> bool:
        """Whether backward has left unsharded gradients that have not been taken yet."""
        gradients = map(getattr, map(_unsharded_of, self.params), repeat("grad"), repeat(None))
        return any(map(is_not, gradients, repeat(None)))

    def check_reduced(self) -> None:
        """Raises if a backward has left gradients here that our hooks have not seen.

        Raises:
            RuntimeError: with the FQN of a parameter whose gradient would be missing from the optimizer's step.
        """
        if self.context.finalization is not None:
            raise RuntimeError(
                f"an optimizer steps while the gradients of '{self.label}' are being reduced; call wait() on the "
                "handle of finalize_backward(async_op=True) first"
            )
        if not in_backward():
            self.refuse_unended("an optimizer steps")
            if self._ticket is not None:  # a gather under way reads the shards, and so do peers
                self._ticket.wait()
                self.context.settle_gathers()
        if not self.settings.reduce_grads or self._accumulating or self.phase is not Phase.IDLE:
            return
        if self.has_gradients:
            param = next(one for one in self.params if getattr(one.unsharded_param, "grad", None) is not None)
            raise RuntimeError(
                f"the gradient of parameter '{param.fqn}' was not reduced: backward entered '{self.label}' through "
                "a tensor that is neither an output of a sharded module nor kept on one. Return the tensor from "
                "the module's forward, or set it as an attribute of the module"
            )

    @property
    def pending(self) -> list[FSDPParam]:
        """The parameters with gradients that an earlier backward has left unreduced, or summed over shards only."""
        if not self._accumulating and not self._reduction.has_partial:
            return []
        return [param for param in self.params if any(one is not None for one in param.pending)]

    def refuse_unended(self, what: str) -> None:
        """Raises if a forward or a backward of its root has not ended."""
        for user in self.users:
            user.refuse_unended(what)

    def _reduce(self, params: list[FSDPParam], gradients: list[torch.Tensor], settings: GroupSettings) -> None:
        if not gradients:
            return
        if self.order_check is not None:
            self.context.catch_up()
            label = ", ".join(param.fqn for param in params)
            self.order_check.record("reduce-scatter", label, self.mesh.shard_group, self.device)
            if settings.all_reduce_grads and settings.native_all_reduce:
                for replicas in self.mesh.replicate_groups:
                    self.order_check.record("all-reduce", label, replicas, self.device)
        assert self._transports is not None, self.label  # a gather came before
        transport = self._transports.reduce
        earlier, self._reducing = self._reducing, []
        for ticket in earlier:
            if not ticket.done:  # its backward was not the last: as in stock, sums do not pile up
                ticket.wait()
        for bucket in self._reduction.buckets(params, gradients, transport, settings):
            self.context.free_inputs(but=settings.max_reduce_inputs - 1)  # before memory for others is allocated
            program = self._reduction.program(bucket, self.label, transport, settings)
            self._reducing.append(self.context.reduce(program, self.label))

    def abandon(self) -> None:
        """Recovery: abandons a gather in flight, reshards, and drops unsharded gradients and partial sums."""
        if self._ticket is not None:
            self._ticket.abandon()
            self._gathered, self._ticket = self._ticket, None
        self.forward_users = 0
        self.backward_users.clear()
        self.reshard()
        self._accumulating = False
        if self._transports is not None:
            self._transports.forget_residuals()
        for param in self.params:
            param.forget_gradients()
        self.phase = Phase.IDLE
