"""Measures this machine's description: the performance of each of several ranks while all of them work.

Starts ranks of gloo on the CPU. All of them measure the same thing at the same time, so the numbers account for shared
cores, memory and caches.
"""

from __future__ import annotations

import os
import platform
import statistics
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
