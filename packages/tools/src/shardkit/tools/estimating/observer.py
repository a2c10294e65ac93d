"""Watches one simulated iteration: operators by a dispatch mode, modules by hooks, core by its events."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardkit.core import events
from shardkit.core.engine.group import FSDPParamGroup
from shardkit.core.engine.step import state_of
from shardkit.core.tensors import tensors_in, tensors_with_grad
from shardkit.core.torch_compat import TorchDispatchMode, in_backward, local_of
from shardkit.tools.estimating.job import EstimateError
from shardkit.tools.estimating.memory import Ledger
from shardkit.tools.estimating.trace import (
    Awaited,
    Category,
    Changed,
    Collective,
    Dispatched,
    Entered,
    Held,
    Operators,
    Ran,
    Trace,
    Transfer,
    block_of,
    neighbourhood,
)
from shardkit.tools.profiling.log import FINISHED, STARTED
from shardkit.tools.torch_compat import (
    ASK_DEVICE,
    NEEDS_DATA,
    READ_VALUE,
    FakeTensor,
    FakeTensors,
    fake_error_operator,
    group_named,
)

Phase: TypeAlias = Literal["building", "inputs", "forward", "backward", "optimizer", "between"]


class Whereabouts:
    """Follows a model through forward, backward and optimizer steps.

    Attributes:
        set_phase: the phase outside of modules, optimizer and backward.
        entered: called with the FQN of each module that forward or backward enters.
        after_forward: called with each module that has run, while its parameters still exist, and its FQN.
    """

    def __init__(self, entered: Callable[[str], None], after_forward: Callable[[nn.Module, str], None]) -> None:
        self.set_phase: Phase = "building"
        self.entered = entered
        self.after_forward = after_forward
        self._names: dict[int, str] = {}
        self._running: list[str] = []
        self._backward = ""
        self._stepping = 0  # an optimizer may step others

    def follow(self) -> list[RemovableHandle]:
        """Starts following; used as contexts, the handles end it."""
        return [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(lambda *_: self._step(1)),
            register_optimizer_step_post_hook(lambda *_: self._step(-1)),
        ]

    def name(self, model: nn.Module) -> None:
        self._names = {id(module): fqn for fqn, module in model.named_modules()}

    def here(self) -> tuple[str, Phase]:
        """The running module ("" for the model itself and outside of it), and the current phase."""
        backward = in_backward()
        if self._running:  # with a closure, the optimizer's step runs forward and backward
            return self._running[-1], "backward" if backward else "forward"
        if backward:
            return self._backward, "backward"
        return "", "optimizer" if self._stepping else self.set_phase

    def _step(self, deeper: int) -> None:
        self._stepping += deeper

    def _enter(self, module: nn.Module, args: Any) -> None:
        fqn = self._names.get(id(module))
        if fqn is None:
            return
        if not in_backward():
            self._backward = ""  # the next backward begins outside of all modules, with the loss
            self.entered(fqn)
            around = self._running[-1] if self._running else ""
            for tensor in tensors_with_grad(args) if torch.is_grad_enabled() else ():
                tensor.register_hook(lambda _: self._left_backward(fqn, around))
        self._running.append(fqn)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        fqn = self._names.get(id(module))
        if fqn is None or not self._running:
            return
        self._running.pop()
        self.after_forward(module, fqn)
        for tensor in tensors_with_grad(output) if torch.is_grad_enabled() else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._entered_backward(fqn))

    def _entered_backward(self, fqn: str) -> None:
        self.entered(fqn)
        # A module's output may be that of an inner module, whose hook has just run.
        if not self._backward.startswith(f"{fqn}." if fqn else "") or not self._backward:
            self._backward = fqn

    def _left_backward(self, fqn: str, around: str) -> None:
        if self._backward == fqn or self._backward.startswith(f"{fqn}."):
            self._backward = around


# Tensor classes that run no operators inside an operator.
_WITHOUT_OPERATORS = (FakeTensor, torch.Tensor, nn.Parameter)

_MADE_IN: dict[str, Category] = {
    "building": "other",
    "inputs": "inputs",
    "forward": "activations",
    "backward": "activations",
    "between": "activations",
    "optimizer": "optimizer",
}

# Kinds of storages that core's communication allocates.
_BUFFERS = ("packed", "reduce_input", "outbox")

# Collectives of the model itself, by prefixes of their operators' names: functional collectives and those of
# `torch.distributed`. The value says whether they work in place, or on several tensors at once.
_COMMUNICATION: dict[str, Collective] = {
    "all_gather_into_tensor": "all-gather",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "all_reduce": "all-reduce",
    "allreduce_": "all-reduce",
    "all_to_all_single": "all-to-all",
    "alltoall_": "all-to-all",
    "broadcast": "broadcast",
}


class Observer(TorchDispatchMode):
    """Keeps the ledger and the trace of a rank while it is active.

    Attributes:
        trace: the events since `start`.
        values_read: places that asked for a tensor's data, which fake tensors lack; the answer was 1.
        repeated: FQN of the list of repeated blocks that the trace distinguishes (`Entered`, `Held.block`), if any.
        mixed: whether the optimizer ran an operator on tensors of several blocks.
    """

    def __init__(self, ranks_per_host: int, fake: FakeTensors, repeated: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self.where = Whereabouts(self._entered, self._after_forward)
        self.ledger = Ledger(self._changed)
        self.trace = Trace()
        self.values_read: dict[str, None] = {}
        self.mixed = False
        self._recording = False
        self.repeated = repeated
        self._block: int | None = None
        self._last = ""
        self._ranks_per_host = ranks_per_host
        self._operators = Operators()
        self._inside: int | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[Collective, str], deque[int]] = defaultdict(deque)
        self._functional: dict[int, int] = {}
        self._own_all_reduces = 0
        self._watched: dict[int, torch.Tensor] = {}
        self._offloaded: dict[int, torch.Tensor] = {}
        self._on_host: list[tuple[FSDPParamGroup, int]] = []
        self._copied: Counter[str] = Counter()  # bytes of a group's shards on the host, by its label
        self._open = ExitStack()

    def __enter__(self) -> Observer:
        following: list[AbstractContextManager[Any]] = [*self.where.follow(), events.subscribe(self._on_event)]
        for one in following:
            self._open.enter_context(one)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self._open.close()

    def start(self) -> None:
        self.trace = Trace(held=self.ledger.live)
        self._block = None
        self._recording = True
        for group, nbytes in self._on_host:  # not earlier: groups get their labels in the first forward
            self._copied[group.label] += nbytes

    def stop(self) -> Trace:
        """Stops recording; returns the events since `start`."""
        found, self.trace = self.trace, Trace()
        return found

    @property
    def offloads(self) -> bool:
        """Whether `CPUOffloadPolicy` keeps parameters of the model in host memory, beside a device."""
        return bool(self._offloaded)

    def adopt(self, model: nn.Module, *, has_device: bool = False) -> None:
        """Call after building the model: assigns categories to its parameters and buffers."""
        self._fake.forget()
        if has_device:
            states = [state for module in model.modules() if (state := state_of(module)) is not None]
            for group, param in ((one, param) for state in states for one in state.groups for param in one.params):
                if param.offload is not None:
                    self._offloaded[id(param.sharded_param)] = param.sharded_param
                    self._on_host.append((group, on_this_rank(param.sharded_param).nbytes))
        if self.repeated is not None:
            self._last = f"{self.repeated}.{list(dict(model.get_submodule(self.repeated).named_children()))[-1]}"
        self.where.name(model)
        for fqn, parameter in model.named_parameters():
            host = id(parameter) in self._offloaded
            self.ledger.assign(on_this_rank(parameter), "sharded_parameters", self._block_of(fqn), host)
            self._watch_gradient(parameter, fqn)
        for fqn, buffer in model.named_buffers():
            self.ledger.assign(on_this_rank(buffer), "other", self._block_of(fqn))

    def announce(self, inside: int) -> None:
        """Announces how many bytes core's next communication sends inside this host."""
        self._inside = inside

    # -- memory, and repeated blocks -----------------------------------------------------------------------------------

    def _changed(self, held: Held, nbytes: int) -> None:
        fqn, phase = self.where.here()
        if phase in ("optimizer", "between") and held.category == "gradients" and held.block is not None:
            self._come_to(held.block)
        self.trace.steps.append(Changed(held, nbytes, fqn, phase))

    def _block_of(self, fqn: str) -> int | None:
        """The repeated block that a name belongs to, -1 for none; None if blocks are not distinguished."""
        if self.repeated is None:
            return None
        return block_of(fqn, f"{self.repeated}.")

    def _entered(self, fqn: str) -> None:
        block = self._block_of(fqn)
        if block is not None and block >= 0:
            self._come_to(block)

    def _come_to(self, block: int) -> None:
        if block != self._block:
            self._block = block
            self.trace.steps.append(Entered(block))

    def _come_to_owner(self, args: Sequence[Any]) -> None:
        """Before an operator of the optimizer: it moves on from one block's parameters to the next."""
        blocks = {held.block for held in self._found(args) if held.block is not None}
        if len(blocks) == 1:
            self._come_to(blocks.pop())
        self.mixed = self.mixed or len(blocks) > 1

    def _found(self, args: Sequence[Any]) -> list[Held]:
        found = (self.ledger.find(one) for one in tensors_in(args) if isinstance(one, FakeTensor))
        return [held for held in found if held is not None]

    # -- operators -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is ASK_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(one not in _WITHOUT_OPERATORS for one in types):
            if tensors := sum(isinstance(one, DTensor) for one in tensors_in((args, kwargs))):
                self.trace.steps.append(Dispatched(tensors, *self.where.here()))
            return NotImplemented  # operators that a DTensor or another subclass runs inside arrive separately
        if function is not torch.ops.aten.lift_fresh.default and _real_only(args):  # such as the ranks of a mesh
            with self._fake.real():
                return function(*args, **kwargs)
        if function is READ_VALUE:
            return self._read_value(args[0])
        if self.repeated is not None and self.where.here()[1] == "optimizer":
            self._come_to_owner(args)
        try:
            out = self._fake.run(function, args, kwargs)
        except NEEDS_DATA as error:
            raise self._needs_data(error) from error
        fqn, phase = self.where.here()
        if phase != "building":
            self._fake.forget()
        category, block = _MADE_IN[phase], self._block if phase == "optimizer" else None
        # An optimizer steps on the host. Forward and backward work on copies on the device.
        host = self.offloads and phase not in ("forward", "backward") and any(one.host for one in self._found(args))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.ledger.see(tensor, category, block, host)
        if function.namespace in ("_c10d_functional", "c10d"):
            self._communicated(function, args, out, fqn, phase)
        elif self._recording:
            self.trace.steps.append(Ran(self._operators.of(function, args, kwargs, out), fqn, phase, host))
        return out

    def _read_value(self, tensor: torch.Tensor) -> int | float | bool:
        fqn, phase = self.where.here()
        if phase != "optimizer":  # optimizers read their step count
            self.values_read[f"{phase} of '{fqn}'" if fqn else phase] = None
        if tensor.dtype == torch.bool:
            return True
        return 1.0 if tensor.is_floating_point() else 1

    def _needs_data(self, error: BaseException) -> EstimateError:
        fqn, phase = self.where.here()
        return EstimateError(
            f"{fake_error_operator(error)}, called in {phase} of '{fqn}', gives a tensor whose shape depends on data, "
            "and an estimate has shapes but no data. Give the factory a variant with fixed shapes (for instance a "
            "fixed capacity for each expert, or a mask in place of an index)"
        )

    # -- communication of the model's own ------------------------------------------------------------------------------

    def _communicated(self, function: Any, args: tuple[Any, ...], out: Any, fqn: str, phase: str) -> None:
        name = function._opname
        if name == "wait_tensor":
            number = self._functional.get(id(args[0]))
            if number is not None:
                self._functional = {one: other for one, other in self._functional.items() if other != number}
                self.trace.steps.append(Awaited(number, fqn, phase))
            return
        if name == "allreduce_" and self._own_all_reduces:  # an all-reduce of core, already recorded from its event
            self._own_all_reduces -= 1
            return
        tensors, group = tensors_in(args), _group_of(args)
        if group is None or not tensors:
            return
        # The whole tensors: inputs, or outputs, which are arguments of some operators.
        nbytes = max(sum(t.numel() * t.itemsize for t in tensors_in(some)) for some in (*args, out))
        known = (kind for begin, kind in _COMMUNICATION.items() if name.startswith(begin))
        collective: Collective = next(known, "other")
        # Counts as core does: one chunk for each peer, and twice that for an all-reduce's two halves.
        halves, ranks = 2 if collective == "all-reduce" else 1, group.size()
        wire_bytes = halves * (ranks - 1) * nbytes // ranks
        number = self._launch(collective, fqn, nbytes, wire_bytes, group, dtype=tensors[0].dtype, of_core=False)
        if function.namespace == "_c10d_functional":
            self._functional |= {id(one): number for one in tensors_in(out)}  # the first, if several made it
        else:
            self.trace.steps.append(Awaited(number, fqn, phase))

    # -- core's events -------------------------------------------------------------------------------------------------

    def _on_event(self, event: Any) -> None:
        kind = type(event)
        if kind in STARTED:
            about = {"dtype": event.dtype, "of_core": True, "compressed": event.transport == "compressed"}
            about["copied"] = 0 if kind is events.AllReduceStarted else self._copied[event.fqn]
            self._own_all_reduces += kind is events.AllReduceStarted
            described = STARTED[kind], event.fqn, event.bytes, event.wire_bytes, event.group
            self._waiting[STARTED[kind], event.fqn].append(self._launch(*described, **about))
        elif kind in FINISHED:
            if waiting := self._waiting[FINISHED[kind], event.fqn]:
                self.trace.steps.append(Awaited(waiting.popleft(), *self.where.here()))
        elif kind in (events.StorageAllocated, events.StorageFreed):
            if event.kind == "unsharded":
                self.ledger.unsharded_changed(event.fqn, event.bytes, self._block_of(event.fqn))
            elif kind is events.StorageAllocated and event.kind in _BUFFERS:
                self.ledger.assign_newest(event.bytes, "communication")

    def _launch(
        self, collective: Collective, fqn: str, nbytes: int, wire_bytes: int, group: dist.ProcessGroup, **about: Any
    ) -> int:
        """Records the start of a communication; returns its number. `about` is passed to `Transfer`."""
        ranks, hosts, local = neighbourhood(group, self._ranks_per_host)
        inside, self._inside = self._inside, None
        if inside is None:  # not announced: peers get equal parts
            inside = round(wire_bytes * (len(local) / max(1, ranks - 1)))
        about |= {"ranks": ranks, "hosts": hosts, "group": group.group_name}
        phase, number = self.where.here()[1], next(self._numbers)
        self.trace.steps.append(Transfer(collective, fqn, phase, nbytes, wire_bytes, inside, about=number, **about))
        return number

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _after_forward(self, module: nn.Module, fqn: str) -> None:
        if self._last and fqn == self._last and not in_backward():
            self._come_to(-1)
        for name, parameter in module.named_parameters(fqn, recurse=False):
            if id(parameter) not in self._watched:
                self._watch_gradient(parameter, name)

    def _watch_gradient(self, parameter: torch.Tensor, fqn: str) -> None:
        self._watched[id(parameter)] = parameter
        if parameter.requires_grad and parameter.is_leaf:
            parameter.register_post_accumulate_grad_hook(partial(self._has_gradient, self._block_of(fqn)))

    def _has_gradient(self, block: int | None, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            host = id(parameter) in self._offloaded
            self.ledger.assign(on_this_rank(parameter.grad), "gradients", block, host)


def _real_only(args: tuple[Any, ...]) -> bool:
    """Whether an operator receives tensors, and all of them have data."""
    real = False
    for value in args:
        one = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(one, FakeTensor):
            return False
        real = real or isinstance(value, torch.Tensor)
    return real


def on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; for a DTensor, this rank's local part."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    for value in args:
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
    names = [value for value in args if isinstance(value, str)]  # how to reduce, and then the group
    return group_named(names[-1]) if names else None
