"""Writes the log of one rank: listens to core, hooks optimizer steps and saved tensors, reads memory.

A step lies between two root forwards, the second of which follows an optimizer step; so accumulation and several
optimizers make one step. The log restarts at such a border when the warm-up ends, and closes after the last requested
step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardkit.core import FSDPModule, Owned, events
from shardkit.core.tensors import tensors_in
from shardkit.core.torch_compat import local_of
from shardkit.tools.profiling.log import STARTED, Entry, GradientsKept, Held, OptimizerBegan, OptimizerEnded, carried
from shardkit.tools.report.schema import Group

# At most this many entries are kept: some hundred megabytes.
_MOST_ENTRIES = 2_000_000


class Recorder:
    """One rank's log. `start` begins it, `stop` ends it; both once.

    Attributes:
        entries: (seconds of `time.perf_counter`, entry), in order.
        anchor: host time and a timing event that the device had reached then, None on a CPU.
        truncated: whether there were more entries than are kept.
        full: whether the last requested step is over.
        rank, world_size, backend: taken when the recording begins, because groups may be gone when it ends.
        shards: bytes of this rank's part of each parameter, by FQN.
        owned: bytes of those parts that lie whole on one rank.
        holders: the class of the module that holds each parameter, by the parameter's FQN.
        capacity: bytes of memory, on a CPU for all ranks of the host; 0 if not known.
        seconds: time spent in the recorder.

    Args:
        warmup, steps: the steps to record: `steps` of them (None: until the end) after the first `warmup`.
        when_full: called at the end of the last requested step; must stop the recorder, as the default does.

    Raises:
        ValueError: for a negative `warmup` and for `steps` below 1.
    """

    def __init__(
        self,
        device: torch.device,
        warmup: int,
        steps: int | None,
        when_full: Callable[[], object] | None = None,
        *,
        activations: bool,
    ) -> None:
        if warmup < 0:
            raise ValueError(f"warmup is {warmup}; expected 0 or more steps")
        if steps is not None and steps < 1:
            raise ValueError(f"steps is {steps}; expected at least 1, or None for all")
        self.entries: list[tuple[float, Entry]] = []
        self.began = self.ended = self.seconds = 0.0
        self.anchor: tuple[float, Any] | None = None
        self.truncated = self.full = False
        self.shards: dict[str, int] = {}
        self.owned: set[str] = set()
        self.holders: dict[str, str] = {}
        self.device = device
        self.activations = activations
        self.rank, self.world_size, self.backend = 0, 1, "none"
        if dist.is_initialized():
            self.rank, self.world_size, self.backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
        self.groups: dict[dist.ProcessGroup, Group] = {}
        self._warmup, self._wanted = warmup, steps
        self._when_full = when_full or self.stop
        self._each_event, self._each_pack = _costs()
        self._saved = _SavedTensors(self._write, self._alive, activations)
        self._residence = _Residence(device)
        self.capacity = self._residence.capacity()
        self._subscription: events.Subscription | None = None
        self._hooks: list[Any] = []
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._roots: list[weakref.ref[nn.Module]] = []
        self._gradients: list[tuple[weakref.ref[nn.Parameter], int]] = []
        self._counted: dict[str, int] = {}
        self._stepped = False
        self._steps = self._states = 0
        self._reactions: dict[type, Callable[[Any], None]] = {
            events.ModuleBegan: self._module_began,
            events.ModuleEnded: self._module_ended,
            events.BackwardEnded: self._backward_ended,
            events.RootReady: self._root_ready,
            **dict.fromkeys(STARTED, self._note_group),
        }

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, model: nn.Module | None = None, optimizers: Sequence[Optimizer] = ()) -> None:
        """Starts to record. A model or optimizer that is not passed is found at its first use."""
        self._optimizers.update(optimizers)
        if model is not None:
            self._roots.append(weakref.ref(model))
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        if self.activations:
            self._saved.hooks.__enter__()
        self._begin()
        self._subscription = events.subscribe(self._hear)
        self._count_holdings()

    def stop(self) -> bool:
        """Ends the log; False if it has already ended."""
        if self._subscription is None:
            return False
        self._subscription.close()
        self._subscription = None
        self._count_holdings()
        self.ended = time.perf_counter()
        for hook in self._hooks:
            hook.remove()
        self._saved.stop()
        self._residence.close()
        return True

    def leave(self) -> None:
        """Removes the hooks on saved tensors; call it on the stack frame that called `start`.

        In other frames the user's hooks may lie above them: then they stay, and do nothing once the log is closed.
        """
        if self.activations:
            self._saved.hooks.__exit__()

    def _begin(self) -> None:
        self.seconds = self._saved.seconds = 0.0
        self._saved.packed = 0
        if self.device.type != "cpu":
            event: Any = torch.get_device_module(self.device).Event(enable_timing=True)
            event.record()
            event.synchronize()
            self.anchor = (time.perf_counter(), event)
        self.began = time.perf_counter()

    @property
    def warm(self) -> bool:
        """Whether the warm-up steps are over."""
        return self._steps >= self._warmup

    @property
    def overhead(self) -> float:
        """Seconds that recording has cost: the time measured inside, and the time of the calls, by `_costs`."""
        outside = len(self.entries) * self._each_event + self._saved.packed * self._each_pack
        return self.seconds + self._saved.seconds + outside

    # -- what is heard -------------------------------------------------------------------------------------------------

    def _write(self, entry: Entry) -> None:
        if len(self.entries) < _MOST_ENTRIES:
            self.entries.append((time.perf_counter(), entry))
        else:
            self.truncated = True

    def _hear(self, event: events.Event) -> None:
        began = time.perf_counter()
        self._write(event)
        reaction = self._reactions.get(type(event))
        if reaction is not None:
            reaction(event)
        self.seconds += time.perf_counter() - began

    def _module_began(self, event: events.ModuleBegan) -> None:
        if event.phase == "forward":
            if event.root and self._stepped:
                self._border(event)
                if self.full:
                    return
            self._saved.enter_module(event.fqn)
            if event.root:
                self._count_gradients()
        self._count_resident()

    def _module_ended(self, event: events.ModuleEnded) -> None:
        if event.phase == "forward":
            self._saved.leave_module(event.fqn)
        self._count_resident()

    def _border(self, first: events.ModuleBegan) -> None:
        """Ends a step; the forward that begins with `first` belongs to the next one."""
        self._stepped = False
        self._steps += 1
        if self._steps == self._warmup:
            kept = carried(entry for _, entry in self.entries)
            self._begin()
            self.truncated = False
            self.entries[:] = [(self.began, entry) for entry in (*kept, first)]
        elif self._wanted is not None and self._steps == self._warmup + self._wanted:
            if self.entries[-1][1] is first:
                self.entries.pop()
            self.full = True
            self._when_full()

    def _note_group(self, event: events.GatherStarted | events.ReduceStarted | events.AllReduceStarted) -> None:
        if event.group not in self.groups:
            # Now: when the log is read, the group may have been destroyed.
            self.groups[event.group] = Group(event.group.group_name, dist.get_process_group_ranks(event.group))

    def _root_ready(self, event: events.RootReady) -> None:
        if all(reference() is not event.module for reference in self._roots):
            self._roots.append(weakref.ref(event.module))

    def _backward_ended(self, event: events.BackwardEnded) -> None:
        self._saved.end_backward()
        self._count_gradients()
        self._count_resident()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        began = time.perf_counter()
        if optimizer not in self._optimizers or not self._gradients:
            self._optimizers.add(optimizer)
            self._count_holdings()
            self._count_gradients()
        self._write(OptimizerBegan())
        self.seconds += time.perf_counter() - began

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        began = time.perf_counter()
        self._write(OptimizerEnded())
        self._stepped = True
        states = sum(dict.__len__(one.state) for one in self._optimizers)  # `len` would wait for an overlapped step
        if states != self._states:  # each optimizer creates its state in its own first step
            self._states = states
            self._count_states()
        self._count_resident()
        self.seconds += time.perf_counter() - began

    # -- what is counted -----------------------------------------------------------------------------------------------

    def _alive(self) -> list[nn.Module]:
        return [root for reference in self._roots if (root := reference()) is not None]

    def _count_holdings(self) -> None:
        roots = self._alive()
        if roots:
            named = [(name, one) for root in roots for name, one in root.named_parameters()]
            self.shards = {name: _local_bytes(one) for name, one in named}
            placed = ((name, one.placements) for name, one in named if isinstance(one, DTensor))
            self.owned = {name for name, placements in placed if any(isinstance(one, Owned) for one in placements)}
            self.holders = {
                f"{path}.{name}" if path else name: _class_of(module)
                for root in roots
                for path, module in root.named_modules()
                for name, _ in module.named_parameters(recurse=False)
            }
            self._count("sharded_parameters", sum(self.shards.values()))
            self._count("other", sum(_local_bytes(one) for root in roots for one in root.buffers()))
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        stepped = {id(one): one for group in groups for one in group["params"]}.values()
        self._gradients = [(weakref.ref(one), _local_bytes(one)) for one in stepped]
        if self._optimizers:
            self._count_states()

    def _count_states(self) -> None:
        states = [list(optimizer.state.values()) for optimizer in self._optimizers]
        self._count("optimizer", sum(map(_local_bytes, tensors_in(states))))

    def _count_gradients(self) -> None:
        there = ((reference(), size) for reference, size in self._gradients)
        self._count("sharded_gradients", sum(size for one, size in there if one is not None and one.grad is not None))

    def _count(self, category: str, held: int) -> None:
        if self._counted.get(category) != held:
            self._counted[category] = held
            self._write(Held(category, "", held))

    def _count_resident(self) -> None:
        self._write(Held("resident", "", self._residence.read()))


def _local_bytes(tensor: torch.Tensor) -> int:
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).nbytes


def _class_of(module: nn.Module) -> str:
    """The name of a module's class; for a sharded module, of its original class."""
    own = [cls for cls in type(module).__mro__ if not issubclass(FSDPModule, cls) and not issubclass(cls, FSDPModule)]
    return own[0].__name__


def _limits_of_control_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Memory limits, in bytes, of this process's control groups (version 2), innermost first."""
    try:
        path = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        path = "/"
    limits = []
    place = root / path.strip("/")
    for group in (place, *place.parents):
        if group.is_relative_to(root):
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
                limits.append(int((group / "memory.max").read_text()))
    return limits


class _Residence:
    """Reads the memory of the process: resident memory on a CPU, elsewhere the allocator's reserved memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._file = os.open("/proc/self/statm", os.O_RDONLY) if device.type == "cpu" else -1

    def read(self) -> int:
        if self._module is not None:
            return int(self._module.memory_reserved(self._device))
        return int(os.pread(self._file, 64, 0).split()[1]) * os.sysconf("SC_PAGESIZE")

    def capacity(self) -> int:
        """Bytes of memory, on a CPU at most the control group's limit; 0 if the device does not report it."""
        if self._module is not None:
            told = getattr(self._module, "mem_get_info", None)
            return 0 if told is None else int(told(self._device)[1])
        return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"), *_limits_of_control_groups()])

    def close(self) -> None:
        """Closes the file; call it once."""
        if self._file >= 0:
            os.close(self._file)


def _unchanged(value: Any) -> Any:
    return value


def _costs(rounds: int = 200) -> tuple[float, float]:
    """Seconds to build and emit an event of core, and to call a saved-tensor hook; takes about 5 ms."""

    def seconds(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        for _ in range(rounds):
            work()
        return (time.perf_counter() - began) / rounds

    each_event = seconds(lambda: _unchanged(events.StorageAllocated("layers.0.attention.weight", 4096, "unsharded")))
    with torch.enable_grad():
        one = torch.ones(1, requires_grad=True)
        plain = seconds(one.exp)  # saves one tensor
        with saved_tensors_hooks(_unchanged, _unchanged):
            return each_event, max(0.0, seconds(one.exp) - plain)


class _SavedTensors:
    """Counts tensors that autograd saves on the thread that enters `hooks`, except parameters of `roots`.

    Args:
        write: called with the key and bytes of each storage.
        active: whether to count at all.
    """

    def __init__(self, write: Callable[[Entry], None], roots: Callable[[], list[nn.Module]], active: bool) -> None:
        self.hooks = saved_tensors_hooks(self._pack, _unchanged)
        self.active = active
        self.seconds = 0.0
        self.packed = 0
        self._write = write
        self._roots = roots
        self._known: set[str] = set()
        self._unknown: set[str] = set()
        # By identity, which holds as long as the storage does: looking up a weak reference would cost ten times more.
        self._parameters: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._unsharded: dict[str, weakref.ref[nn.Parameter]] = {}
        self._gradient_hooks: list[RemovableHandle] = []
        self._saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def stop(self) -> None:
        """Stops counting. The hooks on saved tensors stay until `leave`, and do nothing."""
        self.active = False
        for hook in self._gradient_hooks:
            hook.remove()

    def enter_module(self, fqn: str) -> None:
        """Call when the module's forward begins: its unsharded parameters must not be counted.

        They are looked up when a tensor is saved; a forward without grad saves none.
        """
        if fqn not in self._known:
            self._unknown.add(fqn)

    def leave_module(self, fqn: str) -> None:
        self._unknown.discard(fqn)

    def end_backward(self) -> None:
        """Call at the end of a backward: reports which unsharded gradients still exist."""
        if self.active:
            there = ((name, reference()) for name, reference in self._unsharded.items())
            self._write(GradientsKept(tuple(name for name, one in there if one is not None and one.grad is not None)))

    def _know_parameters(self) -> None:
        for root in self._roots():
            for name, parameter in root.named_parameters():
                if not isinstance(parameter, DTensor):
                    self._know(name, parameter)
        self._known.update(self._unknown)
        self._unknown.clear()

    def _know(self, name: str, parameter: nn.Parameter) -> None:
        storage = parameter.untyped_storage()
        key = id(storage)
        if key in self._parameters:
            return
        self._parameters[key] = weakref.ref(storage, lambda _: self._parameters.pop(key, None))
        if parameter.requires_grad:
            hook = functools.partial(self._accumulated, name)
            self._gradient_hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            self._unsharded[name] = weakref.ref(parameter)

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        if self.active and parameter.grad is not None:
            self._write(Held("gradients", name, parameter.grad.nbytes))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.active:
            return tensor
        began = time.perf_counter()
        self.packed += 1
        plain = tensor if type(tensor) is torch.Tensor else _plain(tensor)
        if plain is not None and plain.layout is torch.strided:
            if self._unknown:
                self._know_parameters()
            storage = plain.untyped_storage()
            key = id(storage)
            if key not in self._saved and key not in self._parameters and (nbytes := storage.nbytes()):
                self._saved[key] = weakref.ref(storage, functools.partial(self._dropped, key))
                self._write(Held("activations", key, nbytes))
        self.seconds += time.perf_counter() - began
        return tensor

    def _dropped(self, key: int, _: object) -> None:
        del self._saved[key]
        if self.active:
            self._write(Held("activations", key, 0))


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that holds the memory of a subclass; None for subclasses whose memory cannot be determined."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor if type(tensor) is nn.Parameter else None
