"""The simulated device: `torch.device("sim")`, with streams, events and an allocator that report to an observer.

`device.cpp` makes CPU memory look like an accelerator's to all of PyTorch: autograd switches streams, storages are
resized through an allocator of the device, `torch.Event` and `torch.Stream` work. Process groups are torch's `fake`
ones, whose collectives a dispatch mode reports. Nothing in an engine is patched.

The device stays in the process for good, so tests run it in a process of its own (see `conftest.py`).
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.comms import RankOrderReduceScatter

SOURCE = Path(__file__).with_name("device.cpp")
COMPILER = shutil.which("g++") or shutil.which("clang++")


@dataclass
class Allocation:
    """A block of device memory or of pinned host memory, from the allocator's `allocate` to its `free`.

    `pool` was active on the thread that asked for it.
    """

    at: int
    nbytes: int
    pinned: bool
    stream: int
    born: int
    died: int | None = None
    pool: MemPool | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Access:
    """Bytes `begin` to `end` of an allocation, read or written by a kernel."""

    allocation: Allocation
    begin: int
    end: int
    write: bool


class Observer:
    """A tool overrides these methods. Streams and events are numbers; stream 0 is the default stream."""

    simulation: Simulation  # since it has begun

    def clock(self) -> float:
        """The time of the default stream, where time means something."""
        return 0.0

    def allocated(self, allocation: Allocation) -> None: ...
    def freed(self, allocation: Allocation) -> None: ...
    def ran(self, name: str, stream: int, accesses: Sequence[Access]) -> None:
        """A kernel. Names: operators' own, "copy", "host_to_device" and "device_to_host"."""

    def collective(self, name: str, stream: int, group: dist.ProcessGroup, accesses: Sequence[Access]) -> None: ...
    def computed(self, stream: int, cost: float, what: str) -> None:
        """The model declares that its computation, `what`, takes `cost` on `stream`."""

    def recorded(self, event: int, stream: int) -> None: ...
    def waits(self, stream: int, event: int) -> None: ...
    def host_waits(self, event: int, stream: int) -> None:
        """The host waits for `event`, or for all of `stream` if `event` is not positive, or all streams if it is -1.

        An `event` of -1: nobody asked for it, but a kernel gave the host a number, or memory that is not pinned.
        """

    def host_used(self, access: Access) -> None:
        """An operator of the host reads or writes pinned memory."""

    def used_by(self, allocation: Allocation, stream: int) -> None:
        """`Tensor.record_stream`."""

    def elapsed(self, begin: int, end: int) -> float:
        """Milliseconds between two events."""
        return 0.0

    def queried(self, event: int, stream: int) -> None:
        """The host asks whether `event` is done, or all of `stream` if `event` is 0."""

    def graph(self, stream: int) -> int:
        """The graph that captures the work queued on `stream` now: a positive number, or 0.

        Allocations on that stream come from a private pool of the graph, and `replay` runs its kernels again.
        """
        return 0


class Memory:
    """Every allocation, by address."""

    def __init__(self) -> None:
        self.all: list[Allocation] = []
        self.clock = 0
        self.has_pinned = False
        self._starts: list[int] = []
        self._live: dict[int, Allocation] = {}

    def add(self, at: int, nbytes: int, pinned: bool, stream: int, pool: MemPool | None) -> Allocation:
        self.clock += 1
        self.has_pinned = self.has_pinned or pinned
        allocation = Allocation(at, nbytes, pinned, stream, self.clock, pool=pool)
        bisect.insort(self._starts, at)
        self._live[at] = allocation
        self.all.append(allocation)
        return allocation

    def remove(self, at: int) -> Allocation | None:
        allocation = self._live.pop(at, None)
        if allocation is not None:
            self.clock += 1
            allocation.died = self.clock
            del self._starts[bisect.bisect_left(self._starts, at)]
        return allocation

    @property
    def live(self) -> list[Allocation]:
        return list(self._live.values())

    def find(self, at: int) -> Allocation | None:
        index = bisect.bisect_right(self._starts, at) - 1
        if index < 0:
            return None
        allocation = self._live[self._starts[index]]
        return allocation if at < allocation.at + allocation.nbytes else None

    def access(self, at: int, nbytes: int, write: bool) -> Access | None:
        allocation = self.find(at)
        if allocation is None:  # memory of the host that is not pinned
            return None
        return Access(allocation, at - allocation.at, at - allocation.at + nbytes, write)

    def peak(self, counted: Callable[[Allocation], bool], since: int = 0) -> int:
        """The most bytes that allocations which satisfy `counted` held at once, in the host's order.

        `since`: a value of `clock`, before which nothing counts.
        """
        changes: list[tuple[int, int]] = []
        for allocation in filter(counted, self.all):
            died = allocation.died or self.clock + 1
            if died > since:
                changes.append((max(allocation.born, since), allocation.nbytes))
                changes.append((died, -allocation.nbytes))
        total = most = 0
        for _, change in sorted(changes):
            total += change
            most = max(most, total)
        return most


class Simulation:
    """One device's memory and its observer."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.memory = Memory()
        self.errors: list[BaseException] = []
        self.in_collective = False
        self.declared = 0  # > 0: kernels belong to a computation whose cost is declared
        self.registered: list[tuple[Any, MemPool]] = []  # a backend and its pool

    def allocated(self, at: int, nbytes: int, pinned: int) -> None:
        self.observer.allocated(self.memory.add(at, nbytes, bool(pinned), current_stream(), _active.pool))

    def freed(self, at: int) -> None:
        allocation = self.memory.remove(at)
        if allocation is not None:
            self.observer.freed(allocation)

    def ran(self, name: bytes, stream: int, count: int, at: Any, nbytes: Any, writes: Any) -> None:
        if self.in_collective:
            return
        found = (self.memory.access(at[i], nbytes[i], bool(writes[i])) for i in range(count))
        self.observer.ran(name.decode(), stream, [access for access in found if access is not None])

    def __getattr__(self, name: str) -> Any:
        """`recorded`, `waits`, `elapsed`, `queried` and `graph` concern the observer alone."""
        return getattr(self.observer, name)

    def host_waits(self, event: int, stream: int) -> None:
        if not self.in_collective:
            self.observer.host_waits(event, stream)

    def used_by(self, at: int, stream: int) -> None:
        allocation = self.memory.find(at)
        if allocation is not None:
            self.observer.used_by(allocation, stream)


_I, _P, _F = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_SIGNATURES: dict[str, Any] = {
    "allocated": ctypes.CFUNCTYPE(None, _P, _I, ctypes.c_int),
    "freed": ctypes.CFUNCTYPE(None, _P),
    "ran": ctypes.CFUNCTYPE(
        None, ctypes.c_char_p, _I, ctypes.c_int, ctypes.POINTER(_P), ctypes.POINTER(_I), ctypes.POINTER(ctypes.c_int)
    ),
    "recorded": ctypes.CFUNCTYPE(None, _I, _I),
    "waits": ctypes.CFUNCTYPE(None, _I, _I),
    "host_waits": ctypes.CFUNCTYPE(None, _I, _I),
    "used_by": ctypes.CFUNCTYPE(None, _P, _I),
    "elapsed": ctypes.CFUNCTYPE(_F, _I, _I),
    "queried": ctypes.CFUNCTYPE(None, _I, _I),
    "graph": ctypes.CFUNCTYPE(_I, _I),
}


class _Callbacks(ctypes.Structure):
    _fields_ = list(_SIGNATURES.items())


class _Process:
    library: Any = None
    callbacks: Any = None
    simulation: Simulation | None = None


def _callback(name: str) -> Any:
    def call(*args: Any) -> Any:
        simulation = _Process.simulation
        if simulation is None:
            return 0
        try:
            return getattr(simulation, name)(*args)
        except Exception as error:  # noqa: BLE001 - an exception cannot pass through C++: `simulate` raises it
            simulation.errors.append(error)
            return 0

    return _SIGNATURES[name](call)


def _build() -> Path:
    if COMPILER is None:
        raise RuntimeError("the simulated device is a small C++ file, and there is no g++ or clang++ to compile it")
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = SOURCE.parent / "__pycache__" / f"device-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    root = Path(torch.__path__[0])
    include = root / "include"
    made = target.with_suffix(f".{os.getpid()}")
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-std=c++20", str(SOURCE), "-o", str(made)]
    command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    made.rename(target)
    return target


def current_stream() -> int:
    return int(_Process.library.simulation_stream())


def replay(graph: int) -> None:
    """Runs the kernels of a captured graph again."""
    _Process.library.simulation_replay(graph)


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        return super().__new__(cls, **given) if given else super().__new__(cls, device="sim", priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
        return super().__new__(cls, device="sim", enable_timing=enable_timing)


def _stream_of(number: int) -> Stream:
    return Stream(stream_id=number, device_index=0, device_type=torch._C._autograd.DeviceType.PrivateUse1.value)


@contextlib.contextmanager
def _entered(stream: Any) -> Iterator[None]:
    before = current_stream()
    if stream is not None:
        _Process.library.simulation_set_stream(stream.stream_id)
    try:
        yield
    finally:
        _Process.library.simulation_set_stream(before)


class MemPool:
    """A pool of the simulated allocator, which only notes the allocations made while it is active."""

    def __init__(self, allocator: object = None) -> None:
        self.allocator = allocator

    def snapshot(self) -> list[dict[str, int]]:
        """The memory of the pool, in the words of `torch.cuda.MemPool.snapshot`."""
        assert _Process.simulation is not None
        live = _Process.simulation.memory.live
        return [{"address": one.at, "total_size": one.nbytes} for one in live if one.pool is self]


class _Active(threading.local):
    pool: MemPool | None = None


_active = _Active()


@contextlib.contextmanager
def _use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    before, _active.pool = _active.pool, pool
    try:
        yield
    finally:
        _active.pool = before


def _register_mem_pool(backend: Any, pool: MemPool) -> None:
    assert pool.allocator == backend.mem_allocator
    assert _Process.simulation is not None
    _Process.simulation.registered.append((backend, pool))


def _synchronize() -> None:
    if _Process.simulation is not None:
        _Process.simulation.host_waits(0, -1)


def _captures() -> bool:
    return _Process.simulation is not None and _Process.simulation.graph(current_stream()) > 0


def _device_module() -> ModuleType:
    module: Any = ModuleType("torch.sim")
    module.Stream, module.Event, module.stream = Stream, Event, _entered
    module.MemPool, module.use_mem_pool = MemPool, _use_mem_pool
    module.current_stream = lambda device=None: _stream_of(current_stream())
    module.default_stream = lambda device=None: _stream_of(0)
    module.set_stream = lambda stream: _Process.library.simulation_set_stream(stream.stream_id)
    module.synchronize = lambda device=None: _synchronize()
    module.is_current_stream_capturing = _captures
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module  # type: ignore[no-any-return]


def install() -> None:
    """Makes `torch.device("sim")` work in this process. Calling it twice is harmless."""
    if _Process.library is not None:
        return
    library = ctypes.CDLL(str(_build()))
    library.simulation_stream.restype = ctypes.c_int64
    library.simulation_set_stream.argtypes = [ctypes.c_int64]
    library.simulation_replay.argtypes = [ctypes.c_int64]
    callbacks = _Callbacks(*(_callback(name) for name in _SIGNATURES))
    _Process.callbacks = callbacks
    _Process.library = library
    library.simulation_start(ctypes.byref(callbacks))
    torch.utils.rename_privateuse1_backend("sim")
    module = _device_module()
    sys.modules["torch.sim"] = module
    torch._register_device_module("sim", module)
    atexit.register(library.simulation_start, None)


class _Operators(TorchDispatchMode):
    """Reports collectives of device tensors, and operators of the host that access pinned memory.

    The kernels by which the `fake` group imitates collectives are not reported. If the ranks are `real`, gloo then
    does what it imitated.
    """

    def __init__(self, simulation: Simulation, *, real: bool) -> None:
        super().__init__()
        self.simulation, self.real = simulation, real

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # DTensor goes first, so that its inner operators are seen
            self._note_host(func, args)
            return func(*args, **(kwargs or {}))
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        simulation = self.simulation
        simulation.in_collective = True
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            simulation.in_collective = False
        name = func._schema.name.removeprefix("c10d::").strip("_")
        accesses = list(self._accesses(name, args))
        if accesses:
            if given.get("async_op") or given.get("asyncOp"):
                raise NotImplementedError(f"c10d::{name} with async_op=True: the simulation has no Work to wait for")
            group = next(dist.ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
            if self.real:
                _run_on_gloo(func, args, group)
            simulation.observer.collective(name, current_stream(), group, accesses)
        return result

    def _note_host(self, func: Any, args: Sequence[Any]) -> None:
        memory = self.simulation.memory
        if not memory.has_pinned or func.is_view:
            return
        given = [
            (argument, list(_tensors(value))) for argument, value in zip(func._schema.arguments, args, strict=False)
        ]
        if any(tensor.device.type == "sim" for _, tensors in given for tensor in tensors):
            return  # a kernel of the device, which reports itself
        for argument, tensors in given:
            for tensor in tensors:
                access = memory.access(tensor.data_ptr(), tensor.nbytes, False) if _is_plain_host(tensor) else None
                if access is not None:
                    write = argument.alias_info is not None and argument.alias_info.is_write
                    self.simulation.observer.host_used(replace(access, write=write))

    def _accesses(self, name: str, args: Sequence[Any]) -> Iterator[Access]:
        in_place = name.startswith(("allreduce", "broadcast"))
        for place, value in enumerate(args[: 1 if in_place else 2]):
            for tensor in _tensors(value):
                if tensor.device.type != "sim" or not tensor.numel():
                    continue
                for write in (False, True) if in_place else (place == 0,):
                    access = self.simulation.memory.access(tensor.data_ptr(), tensor.nbytes, write)
                    assert access is not None
                    yield access


def _run_on_gloo(func: Any, args: Sequence[Any], group: dist.ProcessGroup) -> None:
    given = pytree.tree_map_only(torch.Tensor, _on_host, list(args))
    if func is torch.ops.c10d._reduce_scatter_base_.default:  # gloo's order of sums would not be that of the oracle
        RankOrderReduceScatter()(*given[:2], group)
    else:
        _, work = func(*given)
        dist.Work.unbox(work).wait()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host over the memory of the device's `tensor`, or `tensor` itself."""
    if tensor.device.type == "cpu":
        return tensor
    assert tensor.is_contiguous()
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _is_plain_host(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and tensor.numel() > 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


@contextlib.contextmanager
def simulate(
    observer: Observer, world: int, *, coalescing: bool = True, rank: int = 0, store: dist.Store | None = None
) -> Iterator[Simulation]:
    """Runs the block on the simulated device as one of `world` ranks, watched by `observer`.

    `coalescing`: whether process groups say that they run several collectives in one launch, as NCCL's do. `store`:
    where the other ranks meet this one, if they are to be real.
    """
    install()
    FakeProcessGroup.supports_coalescing = coalescing
    FakeProcessGroup.mem_allocator = property(lambda backend: "the network's")
    FakeProcessGroup.register_mem_pool = _register_mem_pool
    simulation = Simulation(observer)
    backend = "sim:fake,cpu:fake" if store is None else "sim:fake,cpu:gloo"
    dist.init_process_group(backend, store=store or FakeStore(), rank=rank, world_size=world)
    _Process.simulation = observer.simulation = simulation
    try:
        with _Operators(simulation, real=store is not None):
            yield simulation
    finally:
        _Process.simulation = None
        _Process.library.simulation_end()
        dist.destroy_process_group()
    if simulation.errors:
        raise simulation.errors[0]


def compute(cost: float, what: str) -> None:
    """Declares that a computation of `cost` runs on the current stream now."""
    if _Process.simulation is not None:
        _Process.simulation.observer.computed(current_stream(), cost, what)


@contextlib.contextmanager
def declared() -> Iterator[None]:
    """Kernels in the block are part of a computation whose cost was declared."""
    simulation = _Process.simulation
    if simulation is not None:
        simulation.declared += 1
    try:
        yield
    finally:
        if simulation is not None:
            simulation.declared -= 1
