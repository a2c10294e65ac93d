"""Measures this machine's description: the performance of each of several ranks while all of them work.

Starts ranks of NCCL, one for each GPU, or of gloo on the CPU. All of them measure the same thing at the same time, so
the numbers account for shared cores, memory, caches and links.
"""

from __future__ import annotations

import functools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from shardkit.core import fully_shard
from shardkit.core.runtime.choice import transport_for
from shardkit.tools.machine import Efficiency, Link, Machine, MachineError, threads_of_each


@dataclass(frozen=True)
class _Sizes:
    """Sizes for a kind of device: sides of matrix products, elements of a stream, widths of groups."""

    sides: dict[torch.dtype, int]
    stream: int
    groups: tuple[int, int]


_SIZES = {
    # Without instructions for bfloat16 a CPU needs seconds for a product that takes milliseconds in float32.
    "cpu": _Sizes({torch.float32: 768, torch.bfloat16: 192}, 4 * 2**20, (64, 1536)),
    # Far beyond the caches of a GPU, and long enough to hide a launch.
    "cuda": _Sizes({torch.float32: 4096, torch.bfloat16: 8192}, 128 * 2**20, (64, 8192)),
}
_HEADS, _LENGTH, _HEAD = 32, 4096, 128  # of the attention that is measured on a GPU
_STORED = 4 * 2**20  # elements


def calibrate(ranks: int | None = None, device: str | None = None) -> Machine:
    """Measures this machine with `ranks` ranks at work. Takes seconds. The result describes one host.

    `device` is "cuda" or "cpu", by default what the machine has. There are as many ranks as GPUs by default, on a CPU
    one for each core, at least two. Other running programs make the machine look slower than it is.

    Raises:
        MachineError: if the ranks cannot be started.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device == "cuda"
    ranks = ranks or (torch.cuda.device_count() if on_gpu else max(2, len(os.sched_getaffinity(0))))
    with tempfile.TemporaryDirectory(prefix="shardkit-calibration-") as directory:
        try:
            spawn(_rank, (ranks, device, directory), nprocs=ranks)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise MachineError(
                f"measuring this machine with {ranks} ranks failed: {error}; "
                "describe it in a file (shardkit estimate --show-machine h100 prints one)"
            ) from error
        found: dict[str, Any] = torch.load(Path(directory) / "found.pt")
    threads = "" if on_gpu else f" {threads_of_each(ranks)} threads each,"
    return Machine(
        name=f"this machine ({found['name']}, {ranks} ranks)",
        device="cuda" if on_gpu else "cpu",
        transport=found["transport"],
        flops={"float32": found["float32"], "bfloat16": found["bfloat16"]},
        memory_bandwidth=found["memory_bandwidth"],
        memory=found["memory"],
        ranks_per_host=ranks,
        inside=Link(found["bandwidth"], found["latency"]),
        between=None,
        efficiency=Efficiency(1.0, min(1.0, found["attention"] / found["bfloat16"]) if on_gpu else 1.0, 1.0),
        operator_seconds=found["operator_seconds"],
        storage_bandwidth=found["storage_bandwidth"],
        process_bytes=found["process_bytes"],
        host_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        host_bandwidth=found["host_bandwidth"] * ranks,
        host_link=found["host_link"],
        sources={"all": f"measured, {ranks} ranks at once,{threads} torch {torch.__version__}"},
    )


def _rank(rank: int, ranks: int, kind: str, directory: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(threads_of_each(ranks))
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    try:
        with device:
            found = _measure(device, ranks, Path(directory) / f"probe-{rank}")
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, found)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        told = {name: value for name, value in found.items() if isinstance(value, str)}
        numbers = {name: statistics.median(one[name] for one in everyone) for name in found if name not in told}
        numbers |= {name: int(numbers[name]) for name in ("process_bytes", "memory")}
        torch.save({**numbers, **told}, Path(directory) / "found.pt")
    # Threads of gloo that outlive the interpreter have ended ranks by SIGABRT ("terminate called without an active
    # exception"), after all was measured; nothing is left here that an orderly end would do.
    os._exit(0)


def _measure(device: torch.device, ranks: int, file: Path) -> dict[str, Any]:
    """The numbers of this rank; tensors are made on `device`, the default."""
    # After a first training step, because the memory for its imports and initialisation stays allocated.
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    fully_shard(model, mesh=_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 8)).sum().backward()
    optimizer.step()
    operator_seconds = _operators()
    _matmul(torch.float32)
    # Before large tensors, but including memory that libraries keep after their first use.
    process_bytes = _bytes_beside_tensors()
    stream = _stream()
    with torch.device("cpu"):
        on_host = _stream()
    latency, bandwidth = _link(stream)
    group = dist.group.WORLD
    assert group is not None
    found = {
        "process_bytes": process_bytes,
        "operator_seconds": operator_seconds,
        "float32": _matmul(torch.float32),
        "bfloat16": _matmul(torch.bfloat16),
        "memory_bandwidth": stream,
        "latency": latency,
        "bandwidth": bandwidth,
        "storage_bandwidth": _storage(file),
        "host_bandwidth": on_host,
        "host_link": _host_link(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {"name": properties.name, "memory": properties.total_memory, "transport": "nccl"}
        return {**found, **gpu, "attention": _attention()}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    transport = "shared" if transport_for(group, device).name == "shared" else "gloo"
    return {**found, "name": platform.machine(), "memory": memory, "transport": transport}


@functools.cache
def _mesh() -> DeviceMesh:
    return init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))


def _sizes() -> _Sizes:
    return _SIZES[torch.get_default_device().type]


def _synchronize() -> None:
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


def _bytes_beside_tensors() -> int:
    """Memory of the process on its device: context and libraries, but not the allocator's."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _seconds(work: Callable[[], object], runs: int = 9, *, launch_only: bool = False) -> float:
    """The median of some runs that all ranks start together; with `launch_only` a device may still be at work."""
    work()
    measured = []
    for _ in range(runs):
        dist.barrier()
        _synchronize()
        started = time.perf_counter()
        work()
        if not launch_only:
            _synchronize()
        measured.append(time.perf_counter() - started)
    return statistics.median(measured)


def _matmul(dtype: torch.dtype) -> float:
    side = _sizes().sides[dtype]
    a, b = torch.rand(side, side).to(dtype), torch.rand(side, side).to(dtype)
    return 2 * side**3 / _seconds(lambda: a @ b, runs=5)


def _stream() -> float:
    """Bytes per second that a sum of two tensors reads and writes."""
    a, b, out = (torch.rand(_sizes().stream) for _ in range(3))
    return 3 * 4 * len(out) / _seconds(lambda: torch.add(a, b, out=out))


def _host_link(device: torch.device) -> float:
    """Bytes per second from pinned memory to the device; on a CPU, where nothing is copied, from memory to memory."""
    host = torch.empty(_STORED, device="cpu", pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)
    return 4 * _STORED / _seconds(lambda: there.copy_(host, non_blocking=True))


def _attention() -> float:
    """FLOP/s of fused causal attention, forward."""
    query, key, value = (torch.rand(1, _HEADS, _LENGTH, _HEAD, dtype=torch.bfloat16) for _ in range(3))
    flops = 2 * _HEADS * _LENGTH**2 * _HEAD  # two products, half of each
    return flops / _seconds(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True))


def _operators() -> float:
    """Host time of a small operator in training, including autograd's part."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(32)))
    x = torch.rand(4, 8)

    def step() -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    # A linear layer runs three operators in forward, and six in backward.
    return _seconds(step, runs=15, launch_only=True) / (32 * 9)


def _link(stream: float) -> tuple[float, float]:
    """Latency and bandwidth of gathers, from a small and a large parameter group."""

    def gather_seconds(width: int) -> float:
        module = fully_shard(nn.Linear(width, width, bias=False), mesh=_mesh())
        return _seconds(lambda: (module.unshard(), module.reshard()))

    ranks = dist.get_world_size()
    if ranks == 1:  # nothing is sent; a link within memory, in case the description is used for more ranks
        return 0.0, stream / 2
    small, large = _sizes().groups
    seconds = gather_seconds(small), gather_seconds(large)
    received = 4 * (large**2 - small**2) * (ranks - 1) / ranks
    return seconds[0], received / max(seconds[1] - seconds[0], 1e-9)


def _storage(file: Path) -> float:
    data = torch.zeros(_STORED, device="cpu")

    def write() -> None:
        with file.open("wb") as opened:
            torch.save(data, opened)
            opened.flush()
            os.fsync(opened.fileno())

    return 4 * _STORED / _seconds(write, runs=3)
