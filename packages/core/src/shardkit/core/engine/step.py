"""A step, in order: what happens around the forward and the backward of the modules of each `fully_shard` call.

    pre_forward    the outermost module begins an iteration; casts inputs, gathers, marks the inputs so that
                   post_backward runs when their gradients are done
    post_forward   marks the outputs so that pre_backward runs when their gradients arrive, frees; the outermost
                   module ends the forward; casts the outputs
    pre_backward   the first one begins the backward; gathers again if necessary
    post_backward  takes gradients, frees, reduces
    end_backward   does both for modules that no hook has reported, and waits for reductions

A group of modules (`fully_shard([a, b])`) makes one *pass* from the first of them that runs to the last; a module that
calls itself also makes one pass. An incomplete pass ends with the forward of the root, or with backward. `reset` is for
steps that do not end.

Note [Ready in order]
A block may keep a tensor on its module (`self.aux = ...`) that its caller adds to the loss. Backward then enters the
block through a tensor without a hook of ours, and must find its parameters gathered. Autograd runs the nodes of one
device in the reverse of the order in which forward made them. So a state's parameters are waited for before backward
can reach any node of its forward: when backward leaves the state that ran next in forward (`_leave_backward`), or, if
no hook reports that, as soon as backward enters that state (`_enter_backward`). No hook reports it if the state is
nested in the other one, or if the other's inputs need no gradient. So whatever order a backward takes, autograd never
finds parameters half-filled by a gather in flight.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core import events
from shardkit.core.engine.group import FSDPParamGroup, Residence
from shardkit.core.engine.handed import HandedContainers
from shardkit.core.engine.root import alive, initialise_root
from shardkit.core.engine.schedule import Backward, CommContext, Finalization, Forward, Pass, Schedule
from shardkit.core.engine.transforms import Watch, watch_together
from shardkit.core.optimizer_steps.plain_steps import lent, restore_interrupted_steps
from shardkit.core.parameters.collect import STATE
from shardkit.core.parameters.param import param_over
from shardkit.core.policies import MixedPrecisionPolicy
from shardkit.core.stock_names import STATE_NAMES, answers_stock_names
from shardkit.core.tensors import cast_floating, map_tensors, reachable_tensors, tensors_in, tensors_kept_by
from shardkit.core.torch_compat import (
    base_of,
    current_backward,
    leaf_or_view,
    made_since,
    move_hooks,
    next_autograd_node,
    no_dynamo,
    outside_transforms,
    register_with_stock,
    transforms_active,
    versions_of,
)

_LOG = logging.getLogger(__name__)

# At most this many passes of forwards without a backward are kept.
_LONGEST = 10_000


def state_of(module: nn.Module) -> FSDPState | None:
    """The state that `fully_shard` gave this module, None if it was not called on it."""
    state: FSDPState | None = module.__dict__.get(STATE)
    return state


@answers_stock_names(STATE_NAMES)
class FSDPState:
    """The state of the modules of one call.

    Attributes:
        groups: one for each mesh, one more for its replicated parameters, and one for each tied parameter.
        schedule: shared by the states of one root from the first forward on, as `index` and `fqn`.
        is_root: None until that is known.
        in_backward: whether backward has entered it and not left it.
        auto_reshard: whether the user left `reshard_after_forward` at its default.
        runs_method: whether a method runs that was registered by `register_fsdp_forward_method`.
    """

    def __init__(
        self, modules: tuple[nn.Module, ...], device: torch.device, mp_policy: MixedPrecisionPolicy, auto_reshard: bool
    ) -> None:
        self.modules = tuple(weakref.ref(module) for module in modules)
        self.device = device
        self.mp_policy = mp_policy
        self.auto_reshard = auto_reshard
        self.groups: list[FSDPParamGroup] = []
        self.schedule: Schedule = Schedule(CommContext(device))
        self.index = 0
        self.fqn = type(modules[0]).__name__
        self.is_root: bool | None = None
        self.in_backward = False
        self.runs_method = False
        self.forward_prefetch: list[weakref.ReferenceType[FSDPState]] = []
        self.backward_prefetch: list[weakref.ReferenceType[FSDPState]] = []
        self._module_ids = frozenset(id(module) for module in modules)
        self._pass = Pass(self.index)  # the running one, or the last one
        self._entered = self._pass  # by backward
        self._wrapped_inputs: list[tuple[torch.Tensor, torch.Tensor]] = []  # of this pass, and what forward gets
        self._handed: list[HandedContainers | None] = []  # of each running forward, outermost first
        self._exception_at_entry = 0  # its id
        for module in modules:
            module.__dict__[STATE] = self
            register_with_stock(module, self)
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward, always_call=True)

    def add_group(self, group: FSDPParamGroup) -> None:
        if group not in self.groups:
            # Prefetching counts a state once: its 0-dim and tied parameters are gathered and freed with the others.
            group.counts_toward_depth = group.counts_toward_depth and not self.groups
            self.groups.append(group)
            if not group.users:
                group.schedule = self.schedule
            group.users.add(self)

    @property
    def groups_below(self) -> Iterable[FSDPParamGroup]:
        """Its groups, and those of the states of modules below its own."""
        modules = (module for top in self.modules if (one := top()) is not None for module in one.modules())
        states = dict.fromkeys(map(state_of, modules))
        return dict.fromkeys(group for state in states if state is not None for group in state.groups)

    @property
    def in_forward(self) -> bool:
        """Whether a forward of one of the modules is running."""
        return bool(self._handed)

    # -- forward begins ------------------------------------------------------------------------------------------------

    @no_dynamo
    def pre_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Runs before the forward of a module; afterwards its unsharded parameters are registered on it."""
        casts = self.mp_policy.param_dtype if self.mp_policy.cast_forward_inputs else None
        if self.in_backward and current_backward() != -1:  # recomputed by activation checkpointing
            if events.hub.active:
                events.emit(events.ModuleBegan(self.fqn, "recompute", bool(self.is_root)))
            self._unshard(in_backward=True)
            return (args, kwargs) if casts is None else cast_floating((args, kwargs), casts)
        if self.is_root is None:
            initialise_root(self)
        self._handed.append(None)  # from here on post_forward, which is called after an error too, undoes this
        if len(self._handed) == 1:
            self._exception_at_entry = id(sys.exc_info()[1])  # the caller may be handling an exception
            if events.hub.active:
                events.emit(
                    events.ModuleBegan(
                        self.fqn, "recompute" if self.schedule.backward is not None else "forward", bool(self.is_root)
                    )
                )
        outermost = self._begin_forward()
        own_args, own_kwargs = args, kwargs
        if outermost and self.device.type != "cpu":  # waits, because callers reuse pinned memory
            args, kwargs = map_tensors(lambda tensor: tensor.to(self.device), (args, kwargs))
        if casts is not None:
            args, kwargs = cast_floating((args, kwargs), casts)
        begins, with_grad = not self._pass.is_open, torch.is_grad_enabled()
        if begins:
            around = self.schedule.innermost
            # A recomputation may begin here; backward then leaves it for the pass around the forward itself.
            recomputes = around is None and self.schedule.backward is not None
            parent = self._pass.backward_parent if recomputes else around
            self._pass = Pass(self.index, next_autograd_node(), parent, around, set(self._module_ids), is_open=True)
            self.schedule.innermost = self._pass
            for group in self.groups:
                group.forward_users.add(self.index)
                group.prefetched = False
                if events.hub.active:
                    _tell_found(group)
        self.in_backward = False
        self._unshard(in_backward=False)
        if begins:
            self._gather_next()
            if with_grad:
                args, kwargs = self._watch_inputs(args, kwargs)
        own, given = (*own_args, *own_kwargs.values()), (*args, *kwargs.values())
        if not all(isinstance(one, torch.Tensor | NoneType) for one in own):
            self._handed[-1] = HandedContainers(own, given, copies_only=not (begins and with_grad))
        return args, kwargs

    def _begin_forward(self) -> bool:
        """Whether this is the outermost forward, which begins an iteration; refuses it if one before has not ended."""
        schedule, context = self.schedule, self.schedule.context
        forward, backward = schedule.forward, schedule.backward
        if context.finalization is not None:
            schedule.refuse_during_finalization(f"forward of '{self.fqn}' begins")
        if backward is not None and current_backward() != -1:
            return False  # a recomputation: end_backward does the work of the end of forward
        if forward is not None or backward is not None:
            # torch calls no hook when Ctrl-C ends a forward. So a root's forward inside itself is taken for one after
            # that, unless it runs in or through a registered method.
            inside = forward is not None and forward.thread == threading.get_ident()
            inside = inside and (self.runs_method or not (self.is_root or forward is None or forward.root() is self))
            if not inside or backward is not None or (forward is not None and forward.raised):
                schedule.refuse_unended(f"forward of '{self.fqn}' begins", inside=inside)
            if forward is not None and forward.root() is not None:
                return False
        schedule.room.free_cached()  # later writes to a local shard are not always noticed
        groups = schedule.groups if self.is_root else self.groups_below
        for group in groups:
            group.sweep()
        schedule.forward = Forward(weakref.ref(self), next(schedule.forward_numbers))
        schedule.innermost = None
        if self.is_root and context.gathers.has_streams:
            # Once for all: gathers of this iteration wait for work queued before it, such as a step or a load. If hooks
            # of gradients step on the shards, these writes come when the reductions in flight end.
            context.gathers.wait_event(context.gathers.current_event())
            if context.in_flight and any(group.written for group in groups):
                context.wait_for_writers()
            for group in groups:
                group.versions[:] = versions_of([param.sharded_param for param in group.params])
        if schedule.post_optim_event is not None:
            context.gathers.wait_event(schedule.post_optim_event)
            schedule.post_optim_event = None
        if lent:  # an optimizer whose step has raised holds other tensors
            restore_interrupted_steps()
        return True

    def _unshard(self, *, in_backward: bool) -> None:
        for group in self.groups:  # all gathers begin before the first one is waited for
            group.unshard(in_backward=in_backward)
        for group in self.groups:
            group.wait_for_unshard()

    def _gather_next(self) -> None:
        schedule, forward = self.schedule, self.schedule.forward
        if schedule.backward is not None or forward is None:  # a recomputation: backward's order holds
            return
        forward.states.append(self.index)
        try:  # found at once if the forward goes as expected
            forward.expected = schedule.order.index(self.index, forward.expected) + 1
            follows = schedule.is_steady or not schedule.context.gathers.has_streams
        except ValueError:
            follows = False
        if self.forward_prefetch:
            _gather_listed(schedule, alive(self.forward_prefetch), in_backward=False)
        elif follows:
            forward.due = max(forward.due, forward.expected)
            end = min(len(schedule.order), forward.expected + schedule.room.states_ahead)
            while forward.due < end:
                state: FSDPState | None = schedule.states[schedule.order[forward.due]]()
                if state is not None and not schedule.room.gather_ahead(state.groups, in_backward=False):
                    break
                forward.due += 1

    def _watch_inputs(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if transforms_active() and self.groups:
            return watch_together((args, kwargs), self.post_backward)  # type: ignore[no-any-return]
        unique = {id(tensor): tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad}
        if not unique or not self.groups:
            return args, kwargs
        watched = dict(zip(unique, self._inputs.apply(self, *unique.values()), strict=True))  # type: ignore[no-untyped-call]
        self._wrapped_inputs.extend(zip(unique.values(), watched.values(), strict=True))
        return map_tensors(lambda tensor: watched.get(id(tensor), tensor), (args, kwargs))  # type: ignore[no-any-return]

    @functools.cached_property
    def _inputs(self) -> type[_Inputs]:
        """Torch names the node in its error when forward changes an input in place."""
        kind = type(f"Inputs of '{self.fqn}'", (_Inputs,), {})
        if (spmd := sys.modules.get("spmd_types")) is not None:
            spmd.register_local_autograd_function(kind)  # outputs have the types of inputs
        return kind

    # -- forward ends --------------------------------------------------------------------------------------------------

    @no_dynamo
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Runs after the forward of a module, even if it raised (then `output` is None)."""
        casts, recomputes = self.mp_policy.output_dtype, self.schedule.backward is not None
        if not self._handed:
            if not self.in_backward or current_backward() == -1:  # a hook before ours raised
                return output
            if events.hub.active:
                events.emit(events.ModuleEnded(self.fqn, "recompute", bool(self.is_root)))
            return output if casts is None else cast_floating(output, casts)
        self._pass.pending.discard(id(module))
        if (handed := self._handed.pop()) is not None:
            if torch.is_grad_enabled() and not transforms_active():
                for tensor in handed.added():  # to the caller's containers: backward may enter through them
                    if tensor.requires_grad and made_since(tensor, self._pass.began):
                        self._watch_output(tensor)
            handed.give_back(undo=recomputes)
        if not self._handed:
            raised = sys.exc_info()[1]
            failed = id(raised) != self._exception_at_entry
            if failed and raised is not None:
                _add_module(raised, self.fqn)
            if failed and not recomputes:
                # Reshards nothing: a gather may be in flight, for which a peer may never come.
                self._wrapped_inputs.clear()
                if self._pass.is_open:
                    self.end_pass(reshards=False)
                if (forward := self.schedule.forward) is not None and forward.root() is self:
                    forward.raised = True
            else:  # a recomputation stops by an error where it has made the last tensor that backward needs
                output = self._end_forward(output, failed=failed)
            if events.hub.active:
                events.emit(events.ModuleEnded(self.fqn, "recompute" if recomputes else "forward", bool(self.is_root)))
        return output if casts is None else cast_floating(output, casts)

    def _end_forward(self, output: Any, *, failed: bool) -> Any:
        # In a single process watched inputs are the caller's tensors: a hook that forward puts on one sees the gradient
        # from all its users, and an input that forward returns is not a result of forward.
        originals = {id(watched): original for original, watched in self._wrapped_inputs}
        inputs = {id(original) for original, _ in self._wrapped_inputs}
        for original, watched in self._wrapped_inputs:
            move_hooks(watched, original)
        self._wrapped_inputs.clear()
        try:
            if originals:
                output = map_tensors(lambda tensor: originals.get(id(tensor), tensor), output)
            output = self._watch_outputs(output, inputs)
        except RuntimeError as error:  # an output is a view of an input that was changed in place
            if "modified inplace" not in str(error):
                raise
            raise RuntimeError(
                f"'{self.fqn}' returns a view of an input that was changed in place; clone the input first: {error}"
            ) from error
        if not failed and not transforms_active():
            self._watch_kept()
        if self._pass.is_open and (failed or not self._pass.pending):
            self.end_pass()
        if (forward := self.schedule.forward) is not None and forward.root() is self:
            self._end_root_forward()
        return output

    @outside_transforms
    def _end_root_forward(self) -> None:
        """The outermost forward has ended: learns its order, and frees groups that were prefetched but not used."""
        schedule = self.schedule
        for state in schedule.all_states:
            if state._pass.is_open and not state._handed:  # its other modules will not run
                state.end_pass()
        if self.is_root and schedule.forward is not None:
            order = tuple(schedule.forward.states)
            schedule.order, schedule.is_steady = order, order == schedule.order
        schedule.forward = schedule.innermost = None
        schedule.room.free_unused(in_backward=False)
        schedule.room.free_cached(but_for_backward=bool(schedule.passes) and torch.is_grad_enabled())
        schedule.context.wait_until_peers_have_read()

    def end_pass(self, *, reshards: bool = True) -> None:
        """Every module of the state has run, or will not run any more: reshards as configured."""
        schedule, ended, with_grad = self.schedule, self._pass, torch.is_grad_enabled()
        ended.is_open = False
        if schedule.innermost is ended:
            schedule.innermost = ended.forward_parent
        self.in_backward = False
        for group in self.groups:
            group.forward_users.discard(self.index)
        for_backward = with_grad and ended.has_backward
        if for_backward:
            recomputed = schedule.backward is not None
            if not (recomputed and any(one.state == ended.state for one in reversed(schedule.passes))):
                ended.forward_number = 0 if recomputed or schedule.forward is None else schedule.forward.number
                ended.number = next(schedule.pass_numbers)
                schedule.passes.append(ended)
                del schedule.passes[:-_LONGEST]
            if recomputed:
                return  # the backward that requested it continues with it
        if not reshards:
            return
        # Without a following backward, a root that keeps its parameters for backward frees them.
        frees = self.auto_reshard and self.is_root and not (with_grad and next_autograd_node() > ended.began)
        for group in self.groups:
            if group.forward_users or group.backward_users or group.prefetched:
                continue
            if group.settings.reshard_after_forward or frees:
                will_gather = for_backward and group.settings.unshard_in_backward
                group.reshard(keep=with_grad, cache=True, for_backward=will_gather)
            else:
                schedule.room.cache(group, for_backward=for_backward)

    def _watch_outputs(self, output: Any, inputs: set[int]) -> Any:
        """Puts `pre_backward` on every output through which backward may enter the graph of this forward.

        Backward does not enter through one of its `inputs` (their ids): it comes there after it has left. Outputs that
        are parameters, or views of them, are copied, because resharding frees the parameters' memory.

        `_watch_kept` does so for tensors that the modules keep. If none of these is found (a tensor in a global
        variable), the parameters are gathered in time nevertheless: Note [Ready in order].
        """
        watches = torch.is_grad_enabled() and not transforms_active()
        memory: set[int] | None = None
        owned: set[int] = set()
        for tensor in reachable_tensors(output):
            if (local := leaf_or_view(tensor)) is not None:
                if memory is None:
                    memory = {address for group in self.groups for param in group.params for address in param.memory}
                if local.untyped_storage().data_ptr() in memory:
                    owned.add(id(tensor))
                    continue
            if not watches or not tensor.requires_grad or id(tensor) in inputs:
                continue
            # Autograd may refuse to tell the node of a view: see `made_since`.
            if tensor.grad_fn is not None if base_of(tensor) is None else made_since(tensor, 0):
                self._watch_output(tensor)
        if owned:
            if owned - {id(tensor) for tensor in tensors_in(output)}:
                raise RuntimeError(
                    f"'{self.fqn}' returns a parameter, or a view of one, inside a {type(output).__name__}, which "
                    "outlives the parameter's memory. Return a clone of it, or return it in a tuple, list, dict or "
                    "dataclass"
                )
            output = map_tensors(lambda tensor: self._own(tensor) if id(tensor) in owned else tensor, output)
        if torch.is_grad_enabled() and transforms_active():
            self._pass.has_backward = True
            enter = functools.partial(self.pre_backward, of=self._pass)
            return map_tensors(lambda tensor: watch_together(tensor, enter), output)  # each calls for itself
        return output

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter, or of a view of one. It has a place in the graph, unlike a parameter, for our hook."""
        with torch.set_grad_enabled(torch.is_grad_enabled() or isinstance(tensor, nn.Parameter)):
            copy = tensor.clone()
        if tensor.requires_grad and copy.is_leaf:  # without grad, a returned parameter still requires grad
            copy.requires_grad_()
        if copy.grad_fn is not None:
            self._watch_output(copy)
        return copy

    def _watch_kept(self) -> None:
        """Watches tensors that the modules keep; refuses parameters and views of them, whose memory is freed."""
        with_grad = torch.is_grad_enabled()
        for reference in self._keepers:
            if (module := reference()) is None:
                continue
            for attribute, tensor in tensors_kept_by(module):
                if with_grad and tensor.requires_grad and made_since(tensor, self._pass.began):
                    self._watch_output(tensor)
                if type(tensor) not in (torch.Tensor, nn.Parameter) or leaf_or_view(tensor) is None:
                    continue
                param = param_over(tensor.untyped_storage())
                # The list of weights that an RNN keeps changes as parameters are registered.
                if param is not None and not isinstance(module, nn.RNNBase):
                    raise RuntimeError(
                        f"'{self._fqn_of(module)}' keeps parameter '{param.fqn}', or a view of it, beyond forward, in "
                        f"its attribute '{attribute}'. The parameter's memory is freed until it is gathered again. "
                        "Keep a clone, or read the parameter from its module when it is needed"
                    )

    @functools.cached_property
    def _keepers(self) -> list[weakref.ReferenceType[nn.Module]]:
        """The modules of this call, at the first forward, that may keep tensors; torch's own layers do not.

        Not at `fully_shard`: modules are put in between, such as adapters.
        """
        modules: list[nn.Module] = alive(self.modules)
        for module in modules:  # and those that are added below
            modules += [child for child in module.children() if state_of(child) is None]
        return [weakref.ref(one) for one in modules if not type(one).__module__.startswith("torch.nn.modules.")]

    def _fqn_of(self, kept_on: nn.Module) -> str:
        for top in self.modules:
            for name, module in () if (one := top()) is None else one.named_modules():
                if module is kept_on:
                    return f"{self.fqn}.{name}" if name else self.fqn
        return self.fqn

    @outside_transforms
    def _watch_output(self, tensor: torch.Tensor) -> None:
        self._pass.has_backward = True
        tensor.register_hook(functools.partial(self.pre_backward, of=self._pass))
        # If its user changes a view in place, the view gets a new node, and its hook stays on one that never runs.
        base = base_of(tensor)
        if base is not None and base.requires_grad and made_since(base, self._pass.began):
            base.register_hook(functools.partial(self.pre_backward, of=self._pass))

    # -- backward ------------------------------------------------------------------------------------------------------

    @no_dynamo
    def pre_backward(self, gradient: torch.Tensor | None = None, *, of: Pass) -> None:
        """Runs when the gradient of an output arrives, or may arrive next; afterwards the parameters are unsharded."""
        if self.in_backward:
            self._enter_parent(of)  # backward may have left it between two outputs
            if of is not self._entered and not self.schedule.will_be_left(self._entered):  # nor will one
                self._entered = of
                self._enter_backward(of)
            return
        self.in_backward = True
        self._entered = of
        if events.hub.active:
            events.emit(events.ModuleBegan(self.fqn, "backward", bool(self.is_root)))
        if self.schedule.backward is None:
            self.schedule.begin_backward(of, self.end_backward)
        for group in self.groups:
            group.was_left = group.prefetched = False
            group.backward_users.add(self.index)
        for group in self.groups:
            if group.settings.unshard_in_backward:
                if events.hub.active:
                    _tell_found(group)
                group.unshard(in_backward=True)
        for group in self.groups:
            group.wait_for_unshard()
            group.begin_backward()
        self._enter_backward(of)
        self._enter_parent(of)  # backward continues there, and may recompute this pass from there

    def _enter_backward(self, entered: Pass) -> None:
        """Backward enters a pass: gathers the groups that ran before it in forward.

        If no hook reports that backward leaves it, the next state begins at once: Note [Ready in order].
        """
        schedule = self.schedule
        if schedule.backward is None or not schedule.forget_passes(entered):
            return
        passes = schedule.passes
        if self.backward_prefetch:
            listed = alive(self.backward_prefetch)
            _gather_listed(schedule, listed, in_backward=True)
            in_order = {one.state for one in passes[-len(listed) :]}
            for state in listed:
                if state.index not in in_order:
                    for group in state.groups:
                        group.wait_for_unshard()  # no hook reports when backward gets there
        else:
            backward = schedule.backward
            backward.due = min(backward.due, len(passes))
            while backward.due and len(passes) - backward.due < schedule.room.states_ahead:
                before: FSDPState | None = schedule.states[passes[backward.due - 1].state]()
                if before is not None and not schedule.room.gather_ahead(before.groups, in_backward=True):
                    break
                backward.due -= 1
        if passes and (passes[-1].began >= entered.began or not schedule.will_be_left(entered)):
            self._leave_backward()

    def _leave_backward(self) -> None:
        """Backward leaves a state, so it may enter the one that ran before, whose parameters must be gathered.

        A loop, because no hook may report that backward leaves that one either, and there may be thousands: a model
        with many inputs that need no gradient, or forwards whose outputs nobody has used.
        """
        schedule, backward = self.schedule, self.schedule.backward
        assert backward is not None
        backward.to_enter += 1
        if backward.to_enter > 1:  # called by a state that the loop below enters
            return
        try:
            while backward.to_enter and schedule.passes:
                following = schedule.passes[-1]
                state: FSDPState | None = schedule.states[following.state]()
                if state is None:
                    break
                state.pre_backward(of=following)
                backward.to_enter -= 1
        finally:
            backward.to_enter = 0

    def _enter_parent(self, of: Pass) -> None:
        if of.backward_parent is not None:
            parent: FSDPState | None = self.schedule.states[of.backward_parent.state]()
            if parent is not None:
                parent.pre_backward(of=of.backward_parent)

    @no_dynamo
    def post_backward(self, gradients: Sequence[torch.Tensor | None] = ()) -> None:
        """Runs when the gradients of all inputs of a forward are done: reshards and reduces."""
        schedule = self.schedule
        if schedule.backward is None:
            schedule.begin_backward(None, self.end_backward)
        assert schedule.backward is not None
        self.in_backward = False
        # The inner backward of a recomputation may build a graph although the outer one does not.
        builds_graph = schedule.backward.builds_graph or (torch.is_grad_enabled() and not transforms_active())
        for group in self.groups:
            group.backward_users.discard(self.index)
            if not group.backward_users:
                # This group may be the next one. When backward is at its end, nothing else needs the memory.
                group.post_backward(stays=builds_graph, cache=bool(schedule.passes))
        if builds_graph:  # a backward through this one enters here
            for gradient in gradients:
                if gradient is not None and gradient.grad_fn is not None:
                    gradient.register_hook(functools.partial(self.pre_backward, of=self._pass))
        if events.hub.active:
            events.emit(events.ModuleEnded(self.fqn, "backward", bool(self.is_root)))
        self._leave_backward()

    @outside_transforms
    def end_backward(self) -> None:
        """Ends the backward of all states of the root: frees and reduces what no hook of ours has seen."""
        schedule, context = self.schedule, self.schedule.context
        ended = schedule.backward or Backward(-1, False, 0, [])
        schedule.backward = None
        if ended.set_aside:  # in the order of forward again, which the next backward reverses
            schedule.passes = sorted((*ended.set_aside, *schedule.passes), key=attrgetter("forward_number", "number"))
        try:
            schedule.backwards += 1
            for state in reversed(schedule.all_states):
                state._end_own_backward(builds_graph=ended.builds_graph)
            schedule.room.free_unused(in_backward=True)
            is_last = schedule.is_last_backward and not schedule.manual_finalization
            if is_last:
                if schedule.forward is None:  # else it ran within a forward, whose passes others will visit
                    schedule.forget_passes()
                schedule.room.free_cached()
            if is_last or not context.reductions.has_streams:
                # On a CPU the last reductions go on only if somebody waits: gradients would come after `zero_grad()`.
                context.finish_reductions()
            context.wait_until_peers_have_read()
            if events.hub.active:
                events.emit(events.BackwardEnded(is_last))
        except BaseException:  # an error here is one of the backward: it has not ended
            schedule.backward = ended
            raise

    def _end_own_backward(self, *, builds_graph: bool) -> None:
        """Handles groups that our hooks missed, because no input of their forward needed a gradient."""
        if self._pass.is_open and not self._handed:
            self._pass.is_open = False
            for group in self.groups:
                group.forward_users.discard(self.index)
        unfinished, self.in_backward = self.in_backward, False
        for group in self.groups:
            group.backward_users.clear()
            if not group.was_left or group.has_gradients:
                group.post_backward(stays=builds_graph)
            elif not group.forward_users:
                group.reshard_after_use(stays=builds_graph)
            group.was_left = False
        if unfinished and events.hub.active:
            events.emit(events.ModuleEnded(self.fqn, "backward", bool(self.is_root)))

    # -- state dicts ---------------------------------------------------------------------------------------------------

    def to_sharded(self, *unused: Any, **kwargs: Any) -> None:
        """Runs before a state dict is taken: registers sharded parameters on the modules."""
        self.schedule.refuse_unended(f"a state dict of '{self.fqn}' is taken", inside=True)
        for group in self.groups:
            if not group.forward_users:
                group.reshard()
                group.schedule.context.wait_until_peers_have_read()

    def before_load(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,  # torch's hook signature
    ) -> None:
        """Runs before a state dict is loaded: the same. Refuses plain tensors (they would be assigned as they are), but
        not 0-dim ones, which `torch.distributed.checkpoint.state_dict` never distributes: every rank has all of them.
        """
        self.schedule.refuse_unended(f"a state dict is loaded into '{self.fqn}'")
        self.to_sharded()
        error_messages = args[-1]
        for name, parameter in module._parameters.items():
            value = state_dict.get(prefix + name)
            if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if parameter.ndim == value.ndim == 0:
                mesh, placements = parameter.device_mesh, parameter.placements
                state_dict[prefix + name] = DTensor.from_local(value, mesh, placements, run_check=False)
            else:
                error_messages.append(
                    f"'{prefix}{name}' is a plain tensor of shape {tuple(value.shape)}; expected a DTensor like those "
                    "of state_dict(). Load full tensors with shardkit.core.load_full_state_dict"
                )
                state_dict[prefix + name] = parameter  # keeps the current value, so torch does not complain too

    def after_load(self, module: nn.Module, incompatible: Any) -> None:
        """Runs after the state dict of one of its modules is loaded: takes over assigned tensors at once.

        They get the metadata of the parameters: the meaning of their placements, and their boxes.
        """
        for group in self.groups_below:
            group.sweep(loading=True)


# -- ends of a step that the user asks for -----------------------------------------------------------------------------


@outside_transforms
def finalize_backward(schedule: Schedule) -> Finalization:
    """Reduces waiting gradients and reshards, as configured; gradients are available after a wait."""
    if not (schedule.manual_finalization or schedule.unfinalized):
        raise RuntimeError(
            "finalize_backward was called while the end of the last backward finalizes by itself; call "
            "set_manual_backward_finalization(True) before the forward"
        )
    schedule.refuse_in_backward("finalize_backward")
    for state in reversed(schedule.all_states):
        for group in reversed(state.groups):
            group.finalize_backward()
    schedule.unfinalized = False
    schedule.forget_passes()
    schedule.room.free_cached()
    return Finalization(schedule)


def reset(schedule: Schedule) -> None:
    """Forgets a failed iteration: nothing is in flight, everything is sharded, unsharded gradients are dropped."""
    context = schedule.context
    _LOG.info("reset_iter_state: the iteration is dropped")
    if isinstance(context.finalization, Finalization) and context.finalization.schedule is not schedule:
        schedule.refuse_during_finalization("reset_iter_state was called")
    context.finalization = None
    schedule.unfinalized = False
    context.end_or_abandon_all()
    schedule.forward = schedule.backward = schedule.innermost = None
    schedule.forget_passes()
    for state in schedule.all_states:
        for group in state.groups:
            group.abandon()
        state._pass = Pass(state.index)
        state._wrapped_inputs.clear()
        state._handed.clear()
        state.in_backward = False
    schedule.room.clear()


# -- gathers ahead of use ----------------------------------------------------------------------------------------------


def _gather_listed(schedule: Schedule, listed: Iterable[FSDPState], *, in_backward: bool) -> None:
    """Gathers the groups of states in the user's explicit list: all, or as many as a budget has room for."""
    for group in (group for state in listed for group in state.groups):
        if schedule.room.by_bytes and group.schedule is schedule:
            if not schedule.room.gather_ahead([group], in_backward=in_backward):
                return
        elif group.settings.unshard_in_backward or not in_backward:
            group.unshard(in_backward=in_backward)


def _tell_found(group: FSDPParamGroup) -> None:
    """Whether the group had been prefetched for this use, or kept since its last use."""
    found = group.is_unsharded or group.residence is Residence.CACHED
    events.emit((events.PrefetchHit if found else events.PrefetchMiss)(group.label))


def _add_module(error: BaseException, fqn: str) -> None:
    """Adds a note to errors of torch that do not say which module of a sharded model they come from."""
    if not isinstance(error, RuntimeError) or hasattr(error, "__notes__"):  # an inner module has added it
        return
    if "modified inplace. This view was created inside a custom Function" in str(error):
        error.add_note(
            f"'{fqn}' changes one of its inputs in place, or a view of one. fully_shard follows the gradients "
            "of these inputs: clone the input first"
        )
    elif "got mixed torch.Tensor and DTensor" in str(error):
        error.add_note(
            f"'{fqn}' computes with a sharded parameter. Parameters of another fully_shard call are there "
            "while a module of that call runs: compute with them in its forward, give both modules to one call "
            "(fully_shard([a, b])), or unshard() the other module first"
        )


class _Inputs(torch.autograd.Function):
    """The identity on a forward's inputs; its backward runs when all their gradients are done."""

    @staticmethod
    def forward(ctx: Any, state: FSDPState, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        ctx.left = state._pass
        ctx.left.leaving = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.state.post_backward(gradients)
        ctx.state._enter_parent(ctx.left)  # the gradients continue there
        return (None, *gradients)

    jvp = staticmethod(Watch.jvp)
