"""Measures this machine's description: the performance of each of several ranks while all of them work.

Starts ranks of gloo on the CPU. All of them measure the same thing at the same time, so the numbers account for shared
cores, memory and caches.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from shardkit.core import fully_shard
from shardkit.core.runtime.choice import transport_for
from shardkit.tools.estimating.timeline import Roofline
from shardkit.tools.estimating.trace import Operator, TensorSpec
from shardkit.tools.machine import Efficiency, Link, Machine, MachineError, threads_of_each

# Without instructions for bfloat16 a CPU needs seconds for a product that takes milliseconds in float32.
_SIDES = {torch.float32: 768, torch.bfloat16: 192}
_STREAM = 4 * 2**20
_SMALL_GROUP, _LARGE_GROUP = 64, 1536


def calibrate(ranks: int | None = None) -> Machine:
    """Measures this machine with `ranks` ranks at work (default: one for each core, at least two). Takes seconds.

    The result describes one host. Other running programs make it look slower than it is.

    Raises:
        MachineError: if the ranks cannot be started.
    """
    ranks = ranks or max(2, len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="shardkit-calibration-") as directory:
        try:
            spawn(_rank, (ranks, directory), nprocs=ranks)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise MachineError(
                f"measuring this machine with {ranks} ranks failed: {error}; "
                "describe it in a file (shardkit estimate --show-machine h100 prints one)"
            ) from error
        found: dict[str, Any] = torch.load(Path(directory) / "found.pt")
    return Machine(
        name=f"this machine ({platform.machine()}, {ranks} ranks)",
        device="cpu",
        transport=found["transport"],
        flops={"float32": found["float32"], "bfloat16": found["bfloat16"]},
        memory_bandwidth=found["memory_bandwidth"],
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks,
        ranks_per_host=ranks,
        inside=Link(found["bandwidth"], found["latency"]),
        between=None,
        efficiency=Efficiency(1.0, 1.0, 1.0),
        operator_seconds=found["operator_seconds"],
        storage_bandwidth=found["storage_bandwidth"],
        process_bytes=found["process_bytes"],
        sources={
            "all": f"measured, {ranks} ranks at once, {threads_of_each(ranks)} threads each, torch {torch.__version__}"
        },
    )


def _rank(rank: int, ranks: int, directory: str) -> None:
    torch.set_num_threads(threads_of_each(ranks))
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    try:
        found = _measure(Path(directory) / f"probe-{rank}")
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, found)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        numbers = {name: statistics.median(one[name] for one in everyone) for name in found if name != "transport"}
        numbers["process_bytes"] = int(numbers["process_bytes"])
        torch.save({**numbers, "transport": found["transport"]}, Path(directory) / "found.pt")
    # Threads of gloo that outlive the interpreter have ended ranks by SIGABRT ("terminate called without an active
    # exception"), after all was measured; nothing is left here that an orderly end would do.
    os._exit(0)


def _measure(file: Path) -> dict[str, Any]:
    # After a first training step, because the memory for its imports and initialisation stays allocated.
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 8)).sum().backward()
    optimizer.step()
    operator_seconds = _operators()
    _matmul(torch.float32)
    # Before large tensors, but including memory that libraries keep after their first use.
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    a, b, out = torch.rand(_STREAM), torch.rand(_STREAM), torch.empty(_STREAM)
    stream = 3 * 4 * _STREAM / _seconds(lambda: torch.add(a, b, out=out))
    latency, bandwidth = _link(stream)
    group = dist.group.WORLD
    assert group is not None
    return {
        "process_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "operator_seconds": operator_seconds,
        "float32": _matmul(torch.float32),
        "bfloat16": _matmul(torch.bfloat16),
        "memory_bandwidth": stream,
        "latency": latency,
        "bandwidth": bandwidth,
        "storage_bandwidth": _storage(file),
        "transport": "shared" if transport_for(group, torch.device("cpu")).name == "shared" else "pairwise",
    }


def _seconds(work: Callable[[], object], runs: int = 9) -> float:
    """The median of some runs that all ranks start together."""
    work()
    measured = []
    for _ in range(runs):
        dist.barrier()
        started = time.perf_counter()
        work()
        measured.append(time.perf_counter() - started)
    return statistics.median(measured)


def _matmul(dtype: torch.dtype) -> float:
    side = _SIDES[dtype]
    a, b = torch.rand(side, side).to(dtype), torch.rand(side, side).to(dtype)
    return 2 * side**3 / _seconds(lambda: a @ b, runs=5)


def _operators() -> float:
    """Host time of a small operator in training, including autograd's part."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(32)))
    x = torch.rand(4, 8)

    def step() -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    # A linear layer runs three operators in forward, and six in backward.
    return _seconds(step, runs=15) / (32 * 9)


def _link(stream: float) -> tuple[float, float]:
    """Latency and bandwidth of gathers, from a small and a large parameter group."""

    def gather_seconds(width: int) -> float:
        module = fully_shard(nn.Linear(width, width, bias=False))
        return _seconds(lambda: (module.unshard(), module.reshard()))

    ranks = dist.get_world_size()
    if ranks == 1:  # nothing is sent; a link within memory, in case the description is used for more ranks
        return 0.0, stream / 2
    small, large = gather_seconds(_SMALL_GROUP), gather_seconds(_LARGE_GROUP)
    received = 4 * (_LARGE_GROUP**2 - _SMALL_GROUP**2) * (ranks - 1) / ranks
    return small, received / max(large - small, 1e-9)


def _storage(file: Path) -> float:
    data = torch.zeros(_STREAM)

    def write() -> None:
        with file.open("wb") as opened:
            torch.save(data, opened)
            opened.flush()
            os.fsync(opened.fileno())

    return 4 * _STREAM / _seconds(write, runs=3)


_LEAST_RUNS = 5
_LEAST_SECONDS = 0.003
_MOST_BYTES = 2**31


# The program of the other ranks of the host: it keeps cores, caches and memory busy until this process ends.
_COMPANY = """
import os, sys, threading, torch
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
torch.set_num_threads(int(sys.argv[1]))
a, b, c = torch.rand(512, 512), torch.rand(512, 512), torch.rand(2**20)
print("ready", flush=True)
while True:
    a @ b
    torch.nn.functional.gelu(c)
"""


class MeasuredCosts:
    """Runs every operator a few times and takes the median; operators that cannot run alone get roofline times.

    As a context it uses as many threads as a rank would, and keeps the machine as busy as the other ranks of a host
    would: two hardware threads may share one core. The machine's launch time for each operator is subtracted, because
    the measured time contains it.

    Attributes:
        estimated: the operators that could not be run alone.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._roofline = Roofline(machine)
        self._known: dict[Any, float] = {}
        self.estimated: list[str] = []
        self._company: list[subprocess.Popen[bytes]] = []
        self._threads_before = torch.get_num_threads()

    def __enter__(self) -> MeasuredCosts:
        self._threads_before = torch.get_num_threads()
        threads = threads_of_each(self._machine.ranks_per_host)
        try:
            for _ in range(self._machine.ranks_per_host - 1):
                command = [sys.executable, "-c", _COMPANY, str(threads)]
                self._company.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for process in self._company:
                assert process.stdout is not None
                process.stdout.readline()
        except BaseException:
            self.__exit__()
            raise
        torch.set_num_threads(threads)
        return self

    def __exit__(self, *exc_info: object) -> None:
        torch.set_num_threads(self._threads_before)
        for process in self._company:
            process.kill()
            process.communicate()
        self._company = []

    def seconds(self, operator: Operator) -> float:
        key = (operator.function, operator.args, tuple(operator.kwargs.items()))
        if key not in self._known:
            self._known[key] = self._measure(operator)
        return self._known[key]

    def _measure(self, operator: Operator) -> float:
        if not operator.bytes or operator.bytes > _MOST_BYTES:
            return self._roofline.seconds(operator) if operator.bytes else 0.0
        bound = _rows(operator)
        try:
            args = _real(operator.args, bound)
            kwargs = {name: _real(value, bound) for name, value in operator.kwargs.items()}
            with torch.no_grad():
                return max(0.0, _median_seconds(operator.function, args, kwargs) - self._machine.operator_seconds)
        except (RuntimeError, TypeError, ValueError, IndexError):
            self.estimated.append(str(operator.function))
            return self._roofline.seconds(operator)


def _median_seconds(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    function(*args, **kwargs)
    seconds: list[float] = []
    while len(seconds) < _LEAST_RUNS or sum(seconds) < _LEAST_SECONDS:
        started = time.perf_counter()
        function(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _rows(operator: Operator) -> int:
    """The bound for an index: the fewest rows of a tensor of numbers."""
    pictures = [one for one in (*operator.args, *operator.kwargs.values()) if isinstance(one, TensorSpec)]
    rows = [min(shape) for shape, _, dtype in pictures if dtype.is_floating_point and shape and min(shape) > 0]
    return max(1, min(rows, default=1))


def _real(value: Any, bound: int) -> Any:
    if isinstance(value, TensorSpec):
        shape, strides, dtype = value
        # Expanded tensors are filled before they are expanded: several of their elements are one in memory.
        dense = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
        tensor = torch.empty_strided(dense, strides, dtype=dtype)
        if dtype.is_floating_point:
            tensor.uniform_(0.1, 1.0)
        elif dtype == torch.int64:
            tensor.random_(0, bound)
        else:
            tensor.zero_()
        return tensor.expand(shape)
    if isinstance(value, tuple):
        return [_real(one, bound) for one in value]
    return None if isinstance(value, str) and value == "generator" else value
