"""One per `fully_shard` call: the work before and after the forward and backward of its modules.

    pre_forward    gather, cast inputs, mark the inputs so that post_backward fires when their gradients are done
    post_forward   reshard, mark the outputs so that pre_backward fires when their gradients arrive, cast outputs
    pre_backward   gather again if necessary, prefetch
    post_backward  reshard, reduce gradients

A group of modules (`fully_shard([a, b])`) makes one *pass* from the first of them that runs to the last; a module that
calls itself also makes one pass. An incomplete pass ends with the forward of the root, or with backward.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core import events
from shardkit.core.engine.context import CommContext
from shardkit.core.engine.group import FSDPParamGroup, Phase
from shardkit.core.engine.handed import HandedContainers
from shardkit.core.engine.order import Pass
from shardkit.core.engine.root import initialise_root
from shardkit.core.engine.schedule import Schedule
from shardkit.core.engine.transforms import watch_each, watch_together
from shardkit.core.optimizer_steps.plain_steps import restore_interrupted_steps
from shardkit.core.parameters.managed import STATE
from shardkit.core.parameters.param import param_over
from shardkit.core.policies import MixedPrecisionPolicy
from shardkit.core.stock_names import answers_stock_names
from shardkit.core.tensors import (
    cast_floating,
    keeps_tensors,
    map_tensors,
    reachable_tensors,
    tensors_in,
    tensors_kept_by,
    tensors_with_grad,
)
from shardkit.core.torch_compat import (
    base_of,
    in_backward,
    is_leaf_or_view,
    local_of,
    made_since,
    move_hooks,
    next_autograd_node,
    no_dynamo,
    register_with_stock,
    transforms_active,
    unwrapped,
)

__all__ = ["FSDPState", "state_of"]


def state_of(module: nn.Module) -> FSDPState | None:
    """The state that `fully_shard` gave this module, None if it was not called on it."""
    state: FSDPState | None = module.__dict__.get(STATE)
    return state


@answers_stock_names("state")
class FSDPState:
    """The state of the modules of one call.

    Attributes:
        groups: its parameter groups: one, plus one for 0-dim parameters and one for each tied parameter.
        fqn: name of its module below the root, known from the first forward on.
        is_root: whether it is the root; None until that is known.
        auto_reshard: whether the user left `reshard_after_forward` at its default.
    """

    def __init__(
        self, modules: tuple[nn.Module, ...], device: torch.device, mp_policy: MixedPrecisionPolicy, auto_reshard: bool
    ) -> None:
        self.modules = tuple(weakref.ref(module) for module in modules)
        self.device = device
        self.mp_policy = mp_policy
        self.auto_reshard = auto_reshard
        self.groups: list[FSDPParamGroup] = []
        self.schedule = Schedule(CommContext(device))
        self.index = 0
        self.fqn = type(modules[0]).__name__
        self.is_root: bool | None = None
        self.phase = Phase.IDLE
        self.forward_prefetch: list[weakref.ReferenceType[FSDPState]] = []
        self.backward_prefetch: list[weakref.ReferenceType[FSDPState]] = []
        self._module_ids = frozenset(id(module) for module in modules)
        self._in_pass = False
        self._pass = Pass(self.index)  # the running one, or the last one
        self._entered = self._pass  # by backward
        self._inputs: type[_Inputs] | None = None
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []  # inputs of this pass, and forward's replacements
        self._handed: list[HandedContainers] = []  # of each running forward, outermost first
        self._may_keep: list[weakref.ReferenceType[nn.Module]] | None = None
        self.runs_method = False  # one registered by `register_fsdp_forward_method`
        self._depth = 0
        self._handled = 0
        for module in modules:
            module.__dict__[STATE] = self
            register_with_stock(module, self)
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward, always_call=True)

    def add_group(self, group: FSDPParamGroup) -> None:
        """Makes this state gather and reshard `group` as well."""
        if group not in self.groups:
            # Prefetching counts a state once: its 0-dim and tied parameters are gathered and freed with the others.
            group.counts_toward_depth = group.counts_toward_depth and not self.groups
            self.groups.append(group)
            group.users.add(self)

    @property
    def groups_below(self) -> Iterable[FSDPParamGroup]:
        """Its groups, and those of the states of modules below its own."""
        modules = (module for top in self.modules if (one := top()) is not None for module in one.modules())
        states = dict.fromkeys(map(state_of, modules))
        return dict.fromkeys(group for state in states if state is not None for group in state.groups)

    # -- forward -------------------------------------------------------------------------------------------------------

    @property
    def in_forward(self) -> bool:
        """Whether a forward of one of the modules is running."""
        return self._depth > 0

    def refuse_unended(self, what: str, *, inside: bool = False) -> None:
        """Raises if a forward or a backward of its root has not ended (`Schedule.refuse_unended`)."""
        self.schedule.refuse_unended(what, inside=inside)

    @no_dynamo
    def pre_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Runs before the forward of a module; afterwards its unsharded parameters are registered on it."""
        if self.phase is Phase.PRE_BACKWARD and in_backward():  # a recomputation of activation checkpointing
            if events.hub.active:
                events.emit(events.ModuleBegan(self.fqn, "recompute", bool(self.is_root)))
            self._unshard(in_backward=True)
            return self._cast_inputs(args, kwargs)
        if self.is_root is None:
            initialise_root(self)
        self._depth += 1  # from here on post_forward, which is called after an error too, undoes this
        self._handed.append(HandedContainers())
        if self._depth == 1:
            self._handled = id(sys.exc_info()[1])  # a forward may be called while its caller handles an exception
            if events.hub.active:
                events.emit(events.ModuleBegan(self.fqn, self._forward_name, bool(self.is_root)))
        outermost = self.schedule.begin_forward(self)
        if outermost:
            restore_interrupted_steps()
        own_args, own_kwargs = args, kwargs
        if outermost and self.device.type != "cpu":
            args, kwargs = self._move_inputs((args, kwargs))
        args, kwargs = self._cast_inputs(args, kwargs)
        begins = not self._in_pass
        if begins:
            self._begin_pass()
        self.phase = Phase.FORWARD
        self._unshard(in_backward=False)
        if begins:
            listed = self._listed(self.forward_prefetch, in_backward=False) if self.forward_prefetch else None
            self.schedule.enter_forward(self, listed)
            if torch.is_grad_enabled():
                args, kwargs = self._watch_inputs(args, kwargs)
        copies_only = not (begins and torch.is_grad_enabled())
        self._handed[-1].note(own_args, args, copies_only=copies_only)
        self._handed[-1].note((*own_kwargs.values(),), (*kwargs.values(),), copies_only=copies_only)
        return args, kwargs

    def _begin_pass(self) -> None:
        around = self.schedule.innermost
        # A recomputation may begin here; backward then leaves it for the pass around the forward itself.
        outer = self._pass.outer if around is None and self.schedule.in_backward else around
        self._pass = Pass(self.index, next_autograd_node(), outer, around, set(self._module_ids))
        self._in_pass = True
        self.schedule.innermost = self._pass
        for group in self.groups:
            group.forward_users += 1
            group.prefetched = False
            group.report_use()

    @property
    def _forward_name(self) -> Literal["forward", "recompute"]:
        return "recompute" if self.schedule.in_backward else "forward"

    def _unshard(self, *, in_backward: bool) -> None:
        for group in self.groups:
            group.unshard(in_backward=in_backward)
        for group in self.groups:
            group.wait_for_unshard()

    def _listed(self, references: list[weakref.ReferenceType[FSDPState]], *, in_backward: bool) -> list[FSDPParamGroup]:
        """The groups of the states that the user has listed."""
        states = [state for reference in references if (state := reference()) is not None]
        return [
            group for state in states for group in state.groups if group.settings.unshard_in_backward or not in_backward
        ]

    def _watch_inputs(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if transforms_active() and self.groups:
            return watch_together((args, kwargs), self.post_backward)  # type: ignore[no-any-return]
        tensors = tensors_with_grad((args, kwargs))
        if not tensors or not self.groups:
            return args, kwargs
        if self._inputs is None:
            # torch names the node in its error when forward changes an input in place.
            self._inputs = type(f"Inputs of '{self.fqn}'", (_Inputs,), {})
        unique = {id(tensor): tensor for tensor in tensors}
        watched = dict(zip(unique, self._inputs.apply(self, *unique.values()), strict=True))  # type: ignore[no-untyped-call]
        self._given = list(zip(unique.values(), watched.values(), strict=True))
        return map_tensors(lambda tensor: watched.get(id(tensor), tensor), (args, kwargs))  # type: ignore[no-any-return]

    def note_leaving(self, node: Any) -> Pass:
        """Remembers the autograd node whose backward calls `post_backward`; returns this pass."""
        self._pass.leaving = weakref.ref(node)
        return self._pass

    @no_dynamo
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Runs after the forward of a module, even if it raised (then `output` is None)."""
        if not self._depth and self.phase is Phase.PRE_BACKWARD and in_backward():
            if events.hub.active:
                events.emit(events.ModuleEnded(self.fqn, "recompute", bool(self.is_root)))
            return self._cast_outputs(output)
        if self._depth == 0:  # a hook before ours raised
            return output
        self._depth -= 1
        self._pass.pending.discard(id(module))
        self._take_handed(self._handed.pop())
        if self._depth == 0:
            raised = sys.exc_info()[1]
            failed = id(raised) != self._handled
            if failed and raised is not None:
                _add_module(raised, self.fqn)
            if failed and not self.schedule.in_backward:
                self._abandon_forward()
            else:  # a recomputation stops by an error where it has made the last tensor that backward needs
                output = self._end_forward(output, failed=failed)
            if events.hub.active:
                events.emit(events.ModuleEnded(self.fqn, self._forward_name, bool(self.is_root)))
        return self._cast_outputs(output)

    def _end_forward(self, output: Any, *, failed: bool) -> Any:
        inputs = {id(original) for original, _ in self._given}
        try:
            output = self._own_outputs(self._unwatch(output))
        except RuntimeError as error:  # an output is a view of an input that was changed in place
            if "modified inplace" not in str(error):
                raise
            raise RuntimeError(
                f"'{self.fqn}' returns a view of an input that was changed in place; clone the input first: {error}"
            ) from error
        output = self._watch_outputs(output, inputs)
        if not failed and not transforms_active():
            self._watch_kept()
        if self._in_pass and (failed or not self._pass.pending):
            self.end_pass()
        if self.schedule.is_forward_root(self):
            for state in self.schedule.all_states:
                state.end_incomplete_pass()
            self.schedule.end_forward(self)
        return output

    def _abandon_forward(self) -> None:
        """Forward has raised. Reshards nothing: a gather may be in flight, for which a peer may never come."""
        self._given.clear()
        if self._in_pass:
            self.end_pass(reshards=False)
        if self.schedule.is_forward_root(self):
            self.schedule.note_raised()

    def _unwatch(self, output: Any) -> Any:
        """Copies changes of the watched inputs to the caller's tensors.

        In a single process they are the same tensors: a hook that forward puts on an input sees the gradient from all
        its users, and an input that forward returns is not a result of forward.
        """
        given, self._given = self._given, []
        if not given:
            return output
        for original, watched in given:
            move_hooks(watched, original)
        originals = {id(watched): original for original, watched in given}
        if any(id(tensor) in originals for tensor in tensors_in(output)):
            return map_tensors(lambda tensor: originals.get(id(tensor), tensor), output)
        return output

    def end_incomplete_pass(self) -> None:
        """The forward of the root ends: modules of this state that have not run yet will not run."""
        if self._in_pass and self._depth == 0:
            self.end_pass()

    def end_pass(self, *, reshards: bool = True) -> None:
        """Every module of the state has run, or will not run any more: reshards as configured."""
        with_grad = torch.is_grad_enabled()
        self._in_pass = False
        if self.schedule.innermost is self._pass:
            self.schedule.innermost = self._pass.around
        self.phase = Phase.IDLE
        for group in self.groups:
            group.forward_users -= 1
        awaited = with_grad and self._pass.has_backward
        if awaited:
            self.schedule.order.add_pass(self._pass)
            if self.schedule.in_backward:
                return  # recomputed: the backward that requested it continues with it
        if not reshards:
            return
        # Without a following backward, a root that keeps its parameters for backward frees them.
        frees = self.auto_reshard and self.is_root and not (with_grad and next_autograd_node() > self._pass.began)
        for group in self.groups:
            if group.forward_users or group.backward_users or group.prefetched:
                continue
            if group.settings.reshard_after_forward or frees:
                group.reshard(keep=with_grad, release=True, awaited=awaited and group.settings.unshard_in_backward)
            else:
                group.room.release(group, awaited=awaited)

    def _take_handed(self, handed: HandedContainers) -> None:
        """Writes forward's additions back to the caller's lists and dicts; backward may enter through them."""
        if torch.is_grad_enabled() and not transforms_active():
            for tensor in handed.added():
                if tensor.requires_grad and made_since(tensor, self._pass.began):
                    self._watch_output(tensor)
        handed.give_back(undo=self.schedule.in_backward)

    def _own_outputs(self, output: Any) -> Any:
        """Copies outputs that are parameters, or views of them, because resharding frees the parameters' memory.

        The copy also has a place in the graph, unlike a parameter, so `_watch_outputs` can put its hook there.
        """
        suspects = [tensor for tensor in reachable_tensors(output) if is_leaf_or_view(_on_this_rank(tensor))]
        if not suspects:
            return output
        memory = {address for group in self.groups for param in group.params for address in param.memory}
        theirs = {id(tensor) for tensor in suspects if _on_this_rank(tensor).untyped_storage().data_ptr() in memory}
        if not theirs:
            return output
        if theirs - {id(tensor) for tensor in tensors_in(output)}:
            raise RuntimeError(
                f"'{self.fqn}' returns a parameter, or a view of one, inside a {type(output).__name__}, which outlives "
                "the parameter's memory. Return a clone of it, or return it in a tuple, list, dict or dataclass"
            )
        return map_tensors(lambda tensor: self._own(tensor) if id(tensor) in theirs else tensor, output)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter, or of a view of one. A returned parameter is always differentiable."""
        with torch.set_grad_enabled(torch.is_grad_enabled() or isinstance(tensor, nn.Parameter)):
            copy = tensor.clone()
        if tensor.requires_grad and copy.is_leaf:  # without grad, a returned parameter still requires grad
            copy.requires_grad_()
        if copy.grad_fn is not None:
            self._watch_output(copy)
        return copy

    def _watch_outputs(self, output: Any, inputs: set[int]) -> Any:
        """Puts `pre_backward` on every output through which backward may enter the graph of this forward.

        Backward does not enter through one of its `inputs` (their ids): it comes there after it has left.

        `_watch_kept` does so for tensors that the modules keep. If none of these is found (a tensor in a global
        variable), the parameters are gathered in time nevertheless: schedule.py, Note [Ready in order].
        """
        if not torch.is_grad_enabled():
            return output
        if transforms_active():
            self._pass.has_backward = True
            return watch_each(output, functools.partial(self.pre_backward, of=self._pass))
        for tensor in reachable_tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None and id(tensor) not in inputs:
                self._watch_output(tensor)
        return output

    def _watch_kept(self) -> None:
        """Watches tensors that the modules keep; refuses parameters and views of them, whose memory is freed.

        Raises:
            RuntimeError: if a module keeps a parameter that resharding frees, or a view of one.
        """
        with_grad = torch.is_grad_enabled()
        for module in self._keepers:
            for attribute, tensor in tensors_kept_by(module):
                if with_grad and tensor.requires_grad and made_since(tensor, self._pass.began):
                    self._watch_output(tensor)
                if type(tensor) not in (torch.Tensor, nn.Parameter) or not is_leaf_or_view(tensor):
                    continue
                param = param_over(tensor.untyped_storage())
                # The list of weights that an RNN keeps changes as parameters are registered.
                if param is not None and not isinstance(module, nn.RNNBase):
                    raise RuntimeError(
                        f"'{self._fqn_of(module)}' keeps parameter '{param.fqn}', or a view of it, beyond forward, in "
                        f"its attribute '{attribute}'. The parameter's memory is freed until it is gathered again. "
                        "Keep a clone, or read the parameter from its module when it is needed"
                    )

    def _fqn_of(self, kept_on: nn.Module) -> str:
        for top in self.modules:
            for name, module in () if (one := top()) is None else one.named_modules():
                if module is kept_on:
                    return f"{self.fqn}.{name}" if name else self.fqn
        return self.fqn

    def _watch_output(self, tensor: torch.Tensor) -> None:
        self._pass.has_backward = True
        tensor.register_hook(functools.partial(self.pre_backward, of=self._pass))
        # If its user changes a view in place, the view gets a new node, and its hook stays on one that never runs.
        base = base_of(tensor)
        if base is not None and base.requires_grad and made_since(base, self._pass.began):
            base.register_hook(functools.partial(self.pre_backward, of=self._pass))

    @property
    def _keepers(self) -> Iterator[nn.Module]:
        """The modules of this call that may keep tensors, down to those that have a state of their own."""
        if self._may_keep is None:
            found = [module for top in self.modules if (one := top()) is not None for module in _modules_of_call(one)]
            self._may_keep = [weakref.ref(module) for module in found if keeps_tensors(module)]
        return (module for reference in self._may_keep if (module := reference()) is not None)

    # -- backward ------------------------------------------------------------------------------------------------------

    @no_dynamo
    def pre_backward(self, gradient: torch.Tensor | None = None, *, of: Pass) -> None:
        """Runs when the gradient of an output arrives, or may arrive next; afterwards the parameters are unsharded."""
        if self.phase is Phase.PRE_BACKWARD:
            if not self.groups:  # no hook has reported that backward left it
                self.enter_outer(of)
            if of is not self._entered and not self.schedule.order.will_be_left(self._entered):  # nor will one
                self._entered = of
                self.schedule.enter_backward(self, of)
            return
        self.phase = Phase.PRE_BACKWARD
        self._entered = of
        if events.hub.active:
            events.emit(events.ModuleBegan(self.fqn, "backward", bool(self.is_root)))
        self.schedule.begin_backward(of)
        for group in self.groups:
            group.phase = Phase.PRE_BACKWARD
            group.prefetched = False
            group.backward_users.add(self.index)
        needed = [group for group in self.groups if group.settings.unshard_in_backward]
        for group in needed:
            group.report_use()
            group.unshard(in_backward=True)
        for group in self.groups:
            group.wait_for_unshard()
            group.begin_backward()
        self.schedule.enter_backward(self, of)
        self.enter_outer(of)  # backward continues there, and may recompute this pass from there

    def enter_outer(self, of: Pass) -> None:
        """Backward enters the pass around this one, if there is one."""
        if of.outer is not None and (outer := self.schedule.order.state_at(of.outer.state)) is not None:
            outer.pre_backward(of=of.outer)

    def prefetch_for_backward(self) -> list[FSDPState]:
        """Gathers the groups that the user listed for this state's backward; returns their states."""
        listed = self._listed(self.backward_prefetch, in_backward=True)
        self.schedule.gather_listed(listed, in_backward=True)
        return [state for reference in self.backward_prefetch if (state := reference()) is not None]

    def wait_for_unshard(self) -> None:
        """Waits for the gathers of its groups that are under way."""
        for group in self.groups:
            group.wait_for_unshard()

    @no_dynamo
    def post_backward(self, gradients: Sequence[torch.Tensor | None] = ()) -> None:
        """Runs when the gradients of all inputs of a forward are done: reshards and reduces."""
        self.schedule.begin_backward()
        self.phase = Phase.IDLE
        # The inner backward of a recomputation may build a graph although the outer one does not.
        builds_graph = self.schedule.builds_graph or (torch.is_grad_enabled() and not transforms_active())
        for group in self.groups:
            group.backward_users.discard(self.index)
            if not group.backward_users:
                # This group may be the next one. When backward is at its end, nothing else needs the memory.
                group.post_backward(keep=builds_graph, release=bool(self.schedule.order.passes))
        if builds_graph:  # a backward through this one enters here
            for gradient in gradients:
                if gradient is not None and gradient.grad_fn is not None:
                    gradient.register_hook(functools.partial(self.pre_backward, of=self._pass))
        if events.hub.active:
            events.emit(events.ModuleEnded(self.fqn, "backward", bool(self.is_root)))
        self.schedule.leave_backward()

    def end_backward(self) -> None:
        """Runs at the end of a backward: handles states that our hooks missed, such as inputs without gradients."""
        if self._depth == 0 and self._in_pass:
            self._in_pass = False
            for group in self.groups:
                group.forward_users -= 1
        unfinished = self.phase is Phase.PRE_BACKWARD  # no input of its forward needed a gradient
        self.phase = Phase.FORWARD if self._depth else Phase.IDLE
        for group in self.groups:
            group.backward_users.clear()
            if group.phase is not Phase.POST_BACKWARD or group.has_gradients:
                group.post_backward(keep=self.schedule.builds_graph)
            elif not group.forward_users:
                group.reshard_after_use(keep=self.schedule.builds_graph)
            group.phase = Phase.IDLE
        if unfinished and events.hub.active:
            events.emit(events.ModuleEnded(self.fqn, "backward", bool(self.is_root)))

    def reset(self) -> None:
        """Forgets a failed forward or backward."""
        self._in_pass = False
        self._pass = Pass(self.index)
        self._given.clear()
        self._handed.clear()
        self._depth = 0
        self.phase = Phase.IDLE

    # -- casts ---------------------------------------------------------------------------------------------------------

    def _move_inputs(self, value: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self.device), value)  # waits: callers reuse pinned memory

    def _cast_inputs(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        return cast_floating((args, kwargs), dtype)  # type: ignore[no-any-return]

    def _cast_outputs(self, output: Any) -> Any:
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else cast_floating(output, dtype)

    # -- state dicts ---------------------------------------------------------------------------------------------------

    def to_sharded(self, *unused: Any, **kwargs: Any) -> None:
        """Runs before a state dict is taken: registers sharded parameters on the modules."""
        self.refuse_unended(f"a state dict of '{self.fqn}' is taken", inside=True)
        for group in self.groups:
            if not group.forward_users:
                group.reshard()
                group.context.settle_gathers()

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
        self.refuse_unended(f"a state dict is loaded into '{self.fqn}'")
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


def _add_module(error: BaseException, fqn: str) -> None:
    """Adds a note to errors of torch that do not say which module of a sharded model they come from.

    Args:
        error: raised by the forward of a state.
        fqn: name of the state's module.
    """
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


def _on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    tensor = unwrapped(tensor)
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _modules_of_call(top: nn.Module) -> Iterator[nn.Module]:
    yield top
    for child in top.children():
        if state_of(child) is None:
            yield from _modules_of_call(child)


class _Inputs(torch.autograd.Function):
    """The identity on a forward's inputs; its backward runs when all their gradients are done."""

    @staticmethod
    def forward(ctx: Any, state: FSDPState, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        ctx.left = state.note_leaving(ctx)
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.state.post_backward(gradients)
        ctx.state.enter_outer(ctx.left)  # the gradients continue there
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> Any:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)
