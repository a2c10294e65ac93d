"""Weights from sharded training to inference, three ways in turn: `shardkit.weights`, gather and broadcast, files.

    python benchmarks/weights.py                          on one host, then over a shaped link (which needs root)

benchmarks/METHOD.md has the ways. They take turns, in processes of their own. A time runs from the call on the
trainers until the last receiver has the version; the first round, which plans and connects, does not count. "stands
still" is the time until the trainers may change their weights. Memory that two processes share counts in both.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from side_by_side.link import RATES, NoLink, Side, shaped_link
from side_by_side.meters import MemoryMeter
from side_by_side.networks import GPT
from side_by_side.surroundings import surroundings
from torch import multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from turns import table

from shardkit.core import fully_shard
from shardkit.weights import Target, WeightReceiver, WeightSender

SENDERS = 2
WIRE = torch.bfloat16
OURS = ("shared memory", "sockets", "in place", "1 % changed")
SHARED = ("shared memory", "1 % changed")
"""Those that share memory, if there is no link."""
WAYS = (*OURS, "gather", "files")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One of `WAYS`, over a link if there are `sides`."""

    way: str
    receivers: int
    width: int
    rounds: int
    host: str
    port: int
    sides: tuple[Side, Side] | None
    directory: str


@dataclass
class Seen:
    """Of one process.

    Attributes:
        whole: seconds of each round.
        still: seconds of each round until it could go on.
        nbytes: bytes of values that it sends in a round, or wants.
        memory: the most bytes that it held beyond what it had before.
        copy: seconds of one copy of its shards.
    """

    whole: list[float] = field(default_factory=list)
    still: list[float] = field(default_factory=list)
    nbytes: int = 0
    memory: int = 0
    copy: float = 0.0


def build(width: int) -> GPT:
    """A GPT of 12 layers; 98 M parameters with a width of 768."""
    return GPT(vocabulary=8192, context=256, width=width, heads=12, hidden=[4 * width] * 12)


def run(rank: int, case: Case, results: Any) -> None:
    """One process: trainer ranks first, then receivers."""
    if case.sides is not None:
        case.sides[int(rank >= SENDERS)].enter()
    torch.set_num_threads(1)
    os.environ["SHARDKIT_SHARED_MEMORY"] = str(int(case.way in SHARED and case.sides is None))
    os.environ["SHARDKIT_WEIGHTS_SECRET"] = "of this run"
    store = dist.TCPStore(case.host, case.port, SENDERS + case.receivers, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SENDERS + case.receivers)
    trainers = dist.new_group(range(SENDERS))
    broadcast = dist.new_group([0, *range(SENDERS, dist.get_world_size())])
    if rank < SENDERS:
        seen = trainer(case, rank, trainers, broadcast)
    else:
        seen = receiver(case, rank - SENDERS, broadcast)
    results.put((rank, seen))
    dist.barrier()
    dist.destroy_process_group()


def rounds(
    case: Case, meter: MemoryMeter, once: Callable[[int], float | None], before: Callable[[], None] | None = None
) -> Seen:
    """Runs `once` with all others, time after time; the first, which plans and connects, is not timed."""
    seen = Seen()
    for version in range(case.rounds + 1):
        if before is not None:
            before()
        dist.barrier()
        begin = time.perf_counter()
        still = once(version)
        if version:
            seen.whole.append(time.perf_counter() - begin)
            seen.still.append(seen.whole[-1] if still is None else still)
    seen.memory = meter.peaks()["resident"]
    return seen


def trainer(case: Case, rank: int, trainers: dist.ProcessGroup, broadcast: dist.ProcessGroup) -> Seen:
    torch.manual_seed(0)
    model = build(case.width)
    mesh = DeviceMesh.from_group(trainers, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shards = [one.detach().to_local() for one in model.parameters()]
    sent = 0

    def train() -> None:
        """Changes the weights: all, or one element in a hundred."""
        for one in shards:
            one.view(-1)[:: 100 if case.way == "1 % changed" else 1] += 0.5

    def send(version: int) -> float | None:
        nonlocal sent
        begin = time.perf_counter()
        still = None
        if case.way == "in place":
            report = sender.send(version)
        else:
            sending = sender.send(version, async_op=True)
            still = time.perf_counter() - begin
            report = sending.wait()
        assert len(report.receivers) == case.receivers, report.failed
        sent = report.nbytes
        return still

    def gather(version: int) -> None:
        for one in model.state_dict().values():
            whole = one.full_tensor().to(WIRE)
            if rank == 0:
                dist.broadcast(whole, 0, group=broadcast)

    def save(version: int) -> None:
        state = {name: one.detach().to(WIRE) for name, one in model.state_dict().items()}
        dcp.save(state, checkpoint_id=f"{case.directory}/{version}", process_group=trainers)
        dist.barrier()

    meter = MemoryMeter(CPU)
    if case.way in OURS:
        with WeightSender(
            model, f"tcp://{case.host}:{case.port + 1}", dtype=WIRE, receivers=case.receivers,
            delta=case.way == "1 % changed", rank=rank, world_size=SENDERS,
        ) as sender:  # fmt: skip
            seen = rounds(case, meter, send, train)
        seen.nbytes = sent
    elif case.way == "gather":
        seen = rounds(case, meter, gather, train)
        seen.nbytes = sum(one.numel() for one in model.parameters()) * WIRE.itemsize * case.receivers * (rank == 0)
    else:
        seen = rounds(case, meter, save, train)
        seen.nbytes = sum(one.numel() for one in shards) * WIRE.itemsize
    seen.copy = seconds_of_a_copy(shards, trainers)
    return seen


def seconds_of_a_copy(shards: list[torch.Tensor], trainers: dist.ProcessGroup) -> float:
    """Of the shards, in the dtype that is sent, into memory that exists; while the other trainers do the same."""
    copies = [one.to(WIRE) for one in shards]
    times = []
    for _ in range(3):
        dist.barrier(trainers)
        begin = time.perf_counter()
        for copy, one in zip(copies, shards, strict=True):
            copy.copy_(one)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def receiver(case: Case, number: int, broadcast: dist.ProcessGroup) -> Seen:
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in build(case.width).state_dict().items()}
    places: dict[str, tuple[slice, ...]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        rows = shape[0] // case.receivers
        cut = slice(number * rows, (number + 1) * rows) if len(shape) > 1 else slice(0, shape[0])
        places[name] = (cut, *(slice(0, size) for size in shape[1:]))
        tensors[name] = torch.ones([one.stop - one.start for one in places[name]], dtype=WIRE)

    def take(version: int) -> None:
        for name, shape in shapes.items():
            whole = torch.empty(shape, dtype=WIRE)
            dist.broadcast(whole, 0, group=broadcast)
            tensors[name].copy_(whole[places[name]])

    def load(version: int) -> None:
        dist.barrier()
        whole = {name: torch.empty(shape, dtype=WIRE) for name, shape in shapes.items()}
        dcp.load(whole, checkpoint_id=f"{case.directory}/{version}", no_dist=True)
        for name, tensor in tensors.items():
            tensor.copy_(whole[name][places[name]])

    meter = MemoryMeter(CPU)
    if case.way in OURS:
        targets = [Target(name, places[name], tensors[name]) for name in shapes]
        address = f"tcp://{case.host}:{case.port + 1}"
        with WeightReceiver(address, targets, name=str(number), in_place=case.way == "in place") as one:
            seen = rounds(case, meter, lambda version: float(one.receive() - version))
    else:
        seen = rounds(case, meter, take if case.way == "gather" else load)
    seen.nbytes = sum(one.nbytes for one in tensors.values())
    return seen


def measured(case: Case) -> list[Seen]:
    """Runs a case; returns the figures of each process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint", "shardkit.core", "shardkit.weights"])
    results = context.SimpleQueue()
    count = SENDERS + case.receivers
    processes = multiprocessing.start_processes(run, (case, results), count, join=False, start_method="forkserver")
    while not processes.join():  # raises what a process raises
        pass
    found: dict[int, Seen] = dict(results.get() for _ in range(count))
    seen = [found[rank] for rank in range(count)]
    if case.way in ("shared memory", "sockets", "in place"):
        assert sum(one.nbytes for one in seen[:SENDERS]) == sum(one.nbytes for one in seen[SENDERS:])
    return seen


def facts_of(seen: list[Seen]) -> dict[str, Any]:
    """Seconds of the slowest process in each round, bytes by trainer, bytes of memory of the fullest processes."""
    senders, receivers = seen[:SENDERS], seen[SENDERS:]

    def slowest(values: Callable[[Seen], list[float]], processes: list[Seen]) -> list[float]:
        return [round(max(seconds), 4) for seconds in zip(*map(values, processes), strict=True)]

    return {
        "whole": slowest(lambda one: one.whole, seen),
        "still": slowest(lambda one: one.still, senders),
        "copy": round(max(one.copy for one in senders), 4),
        "sent": [one.nbytes for one in senders],
        "sender_memory": max(one.memory for one in senders),
        "receiver_memory": max(one.memory for one in receivers),
    }


HEAD = (
    *("link", "receivers", "way", "all have it, s", "of gather's", "trainers stand still, s", "a copy, s"),
    *("sent by rank 0 + 1, MB", "MiB of a sender", "MiB of a receiver"),
)


def cells(rows: dict[tuple[str, int, str], dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for (link, receivers, way), one in rows.items():
        whole, ratio = statistics.median(one["whole"]), ""
        if gather := rows.get((link, receivers, "gather")):
            ratio = f"{whole / statistics.median(gather['whole']):.2f}"
        sent = " + ".join(f"{nbytes / 1e6:.1f}" for nbytes in one["sent"])
        memory = one["sender_memory"] >> 20, one["receiver_memory"] >> 20
        times = f"{whole:.3f} [{min(one['whole']):.3f}-{max(one['whole']):.3f}]"
        still = f"{statistics.median(one['still']):.3f}", f"{one['copy']:.3f}"
        yield link, receivers, way, times, ratio, *still, sent, *memory


def over(link: str, options: argparse.Namespace) -> Iterator[tuple[tuple[str, int, str], dict[str, Any]]]:
    """Runs all ways over a link, one after the other. Raises NoLink if it cannot be made here."""
    with contextlib.ExitStack() as stack:
        sides = None if link == "none" else stack.enter_context(shaped_link(link))
        host = "127.0.0.1" if sides is None else "10.213.77.1"
        for receivers, way in itertools.product(options.receivers, options.ways):
            if way == "shared memory" and sides is not None:
                continue
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = min(free.getsockname()[1], 65000)
            with tempfile.TemporaryDirectory() as directory:
                case = Case(way, receivers, options.width, options.rounds, host, port, sides, directory)
                yield (link, receivers, way), facts_of(measured(case))
            print(f"{link}, {receivers} receivers, {way}: measured", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--links", nargs="+", choices=("none", *RATES), default=("none", "1gbit"))
    parser.add_argument("--width", type=int, default=768, help="of the model; 768 makes 98 M parameters")
    parser.add_argument("--rounds", type=int, default=3, help="versions that are timed")
    parser.add_argument("--json", type=Path, help="write everything here as well")
    options = parser.parse_args()
    facts = surroundings("cpu", "adamw", None)
    del facts["optimizer"], facts["link"]
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for link in options.links:
        try:
            rows |= over(link, options)
        except NoLink as error:
            print(error, file=sys.stderr)
    print(table(HEAD, cells(rows)))
    if options.json is not None:
        every = [{"link": link, "receivers": count, "way": way, **one} for (link, count, way), one in rows.items()]
        options.json.write_text(json.dumps({**facts, "rows": every}, indent=1) + "\n")


if __name__ == "__main__":
    main()
