"""Weights from sharded training to inference, three ways in turn: `shardkit.weights`, gather and broadcast, files.

    python benchmarks/weights.py                          processes of one host
    python benchmarks/weights.py --link 1gbit             receivers behind a shaped link (needs root)

Two trainer ranks hold a model that `fully_shard` has cut, in float32, and send it in bfloat16. Each receiver holds one
slice of the rows of every matrix, as tensor parallelism would cut it, and the vectors whole. "gather" calls
`full_tensor()` for one name after the other and broadcasts it from rank 0 to all receivers, as trainers do that know no
layouts; "files" is `torch.distributed.checkpoint`, from which each receiver reads whole tensors. A time runs from the
call on the trainers until the last receiver has the version; the median of the rounds counts. "stands still" is the
time until the trainers may change their weights.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import multiprocessing
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side_by_side.link import RATES, Side, shaped_link
from benchmarks.side_by_side.networks import GPT
from shardkit.core import fully_shard
from shardkit.weights import Target, WeightReceiver, WeightSender

SENDERS = 2
WIRE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One row: `way` is "shardkit", "1 % changed", "gather" or "files"; with `sockets` no memory is shared."""

    way: str
    receivers: int
    sockets: bool
    width: int
    rounds: int
    host: str
    port: int
    sides: tuple[Side, Side] | None
    directory: str


@dataclass
class Times:
    """Of one process: seconds of each round, seconds until it could go on, bytes of values that it has sent."""

    whole: list[float]
    stands_still: list[float]
    nbytes: int = 0


def build(width: int) -> GPT:
    """A GPT of 12 layers; 104 M parameters with a width of 768."""
    return GPT(vocabulary=8192, context=256, width=width, heads=12, hidden=[4 * width] * 12)


def run(rank: int, case: Case, results: Any) -> None:
    """One process: trainer ranks first, then receivers."""
    if case.sides is not None:
        case.sides[int(rank >= SENDERS)].enter()
    torch.set_num_threads(1)
    os.environ["SHARDKIT_SHARED_MEMORY"] = "0" if case.sockets else "1"
    os.environ["SHARDKIT_WEIGHTS_SECRET"] = "of this run"
    store = dist.TCPStore(case.host, case.port, SENDERS + case.receivers, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SENDERS + case.receivers)
    trainers = dist.new_group(range(SENDERS))
    broadcast = dist.new_group([0, *range(SENDERS, dist.get_world_size())])
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in build(case.width).state_dict().items()}
    if rank < SENDERS:
        times = trainer(case, rank, trainers, broadcast)
    else:
        times = receiver(case, rank - SENDERS, shapes, broadcast)
    results.put((rank, times))
    dist.barrier()
    dist.destroy_process_group()


def rounds(case: Case, once: Callable[[int], float | None], before: Callable[[int], None] | None = None) -> Times:
    """Runs `once` with all others, time after time; the first, which plans and connects, does not count."""
    times = Times([], [])
    for version in range(case.rounds + 1):
        if before is not None:
            before(version)
        dist.barrier()
        begin = time.perf_counter()
        still = once(version)
        if version:
            times.whole.append(time.perf_counter() - begin)
            times.stands_still.append(times.whole[-1] if still is None else still)
    return times


def trainer(case: Case, rank: int, trainers: dist.ProcessGroup, broadcast: dist.ProcessGroup) -> Times:
    torch.manual_seed(0)
    model = build(case.width)
    mesh = DeviceMesh.from_group(trainers, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def train(version: int) -> None:
        """Changes the weights: all, or one element in a hundred."""
        with torch.no_grad():
            for one in model.parameters():
                local = one.to_local().view(-1)
                local[:: 100 if case.way == "1 % changed" else 1] += 0.5

    if case.way in ("shardkit", "1 % changed"):
        address = f"tcp://{case.host}:{case.port + 1}"
        delta = case.way != "shardkit"
        with WeightSender(
            model, address, dtype=WIRE, receivers=case.receivers, delta=delta, rank=rank, world_size=SENDERS
        ) as sender:
            sent = 0

            def send(version: int) -> float:
                nonlocal sent
                begin = time.perf_counter()
                sending = sender.send(version, async_op=True)
                still = time.perf_counter() - begin
                report = sending.wait()
                assert len(report.receivers) == case.receivers, report.failed
                sent = report.nbytes
                return still

            times = rounds(case, send, train)
        times.nbytes = sent
        return times
    if case.way == "gather":

        def gather(version: int) -> None:
            for one in model.state_dict().values():
                whole = one.full_tensor().to(WIRE)
                if rank == 0:
                    dist.broadcast(whole, 0, group=broadcast)

        times = rounds(case, gather, train)
        times.nbytes = sum(one.numel() for one in model.parameters()) * WIRE.itemsize * case.receivers * (rank == 0)
        return times

    def save(version: int) -> None:
        state = {name: one.detach().to(WIRE) for name, one in model.state_dict().items()}
        dcp.save(state, checkpoint_id=f"{case.directory}/{version}", process_group=trainers)
        dist.barrier()

    times = rounds(case, save, train)
    times.nbytes = sum(one.to_local().numel() for one in model.parameters()) * WIRE.itemsize
    return times


def receiver(case: Case, number: int, shapes: dict[str, torch.Size], broadcast: dist.ProcessGroup) -> Times:
    places: dict[str, tuple[slice, ...]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        rows = shape[0] // case.receivers
        cut = slice(number * rows, (number + 1) * rows) if len(shape) > 1 else slice(0, shape[0])
        places[name] = (cut, *(slice(0, size) for size in shape[1:]))
        tensors[name] = torch.zeros([one.stop - one.start for one in places[name]], dtype=WIRE)
    if case.way in ("shardkit", "1 % changed"):
        targets = [Target(name, places[name], tensors[name]) for name in shapes]
        with WeightReceiver(f"tcp://{case.host}:{case.port + 1}", targets, name=str(number)) as one:
            return rounds(case, lambda version: float(one.receive() - version))
    if case.way == "gather":

        def take(version: int) -> None:
            for name, shape in shapes.items():
                whole = torch.empty(shape, dtype=WIRE)
                dist.broadcast(whole, 0, group=broadcast)
                tensors[name].copy_(whole[places[name]])

        return rounds(case, take)

    def load(version: int) -> None:
        dist.barrier()
        whole = {name: torch.empty(shape, dtype=WIRE) for name, shape in shapes.items()}
        dcp.load(whole, checkpoint_id=f"{case.directory}/{version}", no_dist=True)
        for name, tensor in tensors.items():
            tensor.copy_(whole[name][places[name]])

    return rounds(case, load)


def measured(case: Case) -> str:
    """A row of the table."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    count = SENDERS + case.receivers
    processes = multiprocessing.spawn(run, (case, results), count, join=False)
    while not processes.join():  # raises what a process raises
        pass
    found: dict[int, Times] = dict(results.get() for _ in range(count))
    whole = statistics.median(map(max, zip(*(one.whole for one in found.values()), strict=True)))
    still = statistics.median(map(max, zip(*(found[rank].stands_still for rank in range(SENDERS)), strict=True)))
    sent = " + ".join(f"{found[rank].nbytes / 1e6:.1f}" for rank in range(SENDERS))
    how = "" if case.way in ("gather", "files") else ", sockets" if case.sockets else ", shared memory"
    return f"| {case.way}{how} | {case.receivers} | {whole:.3f} | {still:.3f} | {sent} |"


def cases(options: argparse.Namespace, sides: tuple[Side, Side] | None, directory: str) -> Iterator[Case]:
    host = "127.0.0.1" if sides is None else "10.213.77.1"
    ways = [("shardkit", True), ("1 % changed", True), ("gather", True), ("files", True)]
    if sides is None:
        ways = [("shardkit", False), *ways]
    for receivers in options.receivers:
        for number, (way, sockets) in enumerate(ways):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = min(free.getsockname()[1], 65000)
            yield Case(
                way,
                receivers,
                sockets,
                options.width,
                options.rounds,
                host,
                port,
                sides,
                f"{directory}/{receivers}{number}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", choices=RATES)
    options = parser.parse_args()
    print(
        "| way | receivers | all have it, s | trainers stand still, s | sent by rank 0 + 1, MB |\n|---|---|---|---|---|"
    )
    with contextlib.ExitStack() as stack:
        sides = stack.enter_context(shaped_link(options.link)) if options.link else None
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        for case in cases(options, sides, directory):
            print(measured(case), flush=True)


if __name__ == "__main__":
    main()
