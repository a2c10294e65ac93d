"""Checkpoints against stock's, in one run and in turn: `python -m benchmarks.checkpoints [--what PART ...]`.

The first table: a GPT of 34 M parameters with AdamW on two ranks, sharded by shardkit for both, so that both save the
same tensors. The second (`--what planning`): the cost of planning for up to 4,096 ranks, simulated in one process.
"""

import argparse
import gc
import pickle
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.side_by_side.memory import MemoryMeter
from benchmarks.side_by_side.networks import GPT
from shardkit.core import fully_shard
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from shardkit.core.checkpoint.index import BLOCK_BYTES, pack
from shardkit.core.checkpoint.leaves import Captured, Leaves
from shardkit.core.checkpoint.plan import Layout, Piece, layouts_digest, make_plan
from shardkit.core.checkpoint.saving import Header, Part, build_index, chunks_after
from shardkit.core.checkpoint.stock_metadata import stock_metadata
from tests.support import rank_mesh, run_ranks

Rounds = dict[str, list[float]]


def build(world_size: int) -> tuple[Any, torch.optim.Optimizer]:
    """The network and its optimizer, with state."""
    torch.manual_seed(0)
    model = GPT(vocabulary=8192, context=128, width=512, heads=8, hidden=(2048,) * 8)
    mesh = rank_mesh((world_size,), ("shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def timed(action: Callable[[], Any]) -> float:
    """Seconds of this rank; all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def saving(rank: int, world_size: int, path: Path, rounds: int) -> Rounds:
    """Stalls and whole saves, one after the other in each round."""
    warnings.simplefilter("ignore")
    model, optimizer = build(world_size)
    state = TrainingState(model, optimizer)
    manager = CheckpointManager(path / "ours", keep=1)
    seconds: Rounds = {}
    for number in range(rounds + 1):
        found = _one_round(model, optimizer, manager, state, path / f"stock-{number}", 2 * number)
        if rank == 0:
            for one in path.glob("stock-*"):
                shutil.rmtree(one)
        dist.barrier()
        if number:  # the first round warms up
            for name, value in found.items():
                seconds.setdefault(name, []).append(value)
    return seconds


def _one_round(
    model: Any, optimizer: Any, manager: CheckpointManager, state: TrainingState, stock: Path, step: int
) -> dict[str, float]:
    pending: list[Any] = []
    found = {"stock save": timed(lambda: dcp.save(state_of(model, optimizer), checkpoint_id=stock / "save"))}
    found["stock async_save, stall"] = timed(
        lambda: pending.append(dcp.async_save(state_of(model, optimizer), checkpoint_id=stock / "async"))
    )
    pending[0].result()
    found["ours, stall"] = timed(lambda: manager.save(step, state))
    manager.wait()
    found["ours, whole"] = timed(lambda: manager.save(step + 1, state, blocking=True))
    return found


def memory(rank: int, world_size: int, path: Path) -> dict[str, float]:
    """Bytes held at most during an asynchronous save, beyond those before, staging memory included."""
    warnings.simplefilter("ignore")
    model, optimizer = build(world_size)
    state = TrainingState(model, optimizer)
    sharded = sum(
        value.to_local().nbytes if isinstance(value, DTensor) else value.nbytes
        for value in [*model.state_dict().values(), *(v for one in optimizer.state.values() for v in one.values())]
    )
    with CheckpointManager(path / "warm") as small:  # imports, and objects made on first use
        small.save(0, TrainingState(torch.nn.Linear(1, 1)))
    gc.collect()
    manager = CheckpointManager(path / "ours")
    meter = MemoryMeter(torch.device("cpu"))

    def save() -> None:
        manager.save(1, state)
        manager.wait()

    ours = meter.held_during(save) or 0
    return {"sharded state": sharded, "ours": ours}


def stock_memory(rank: int, world_size: int, path: Path) -> dict[str, float]:
    """The same for stock's async_save."""
    warnings.simplefilter("ignore")
    model, optimizer = build(world_size)
    dcp.async_save({"x": torch.ones(1)}, checkpoint_id=path / "warm").result()
    gc.collect()
    meter = MemoryMeter(torch.device("cpu"))
    held = meter.held_during(lambda: dcp.async_save(state_of(model, optimizer), checkpoint_id=path / "stock").result())
    return {"stock": held or 0}


def loading(rank: int, world_size: int, path: Path, rounds: int) -> Rounds:
    """Restoring a checkpoint of two ranks."""
    warnings.simplefilter("ignore")
    model, optimizer = build(world_size)
    state = TrainingState(model, optimizer)
    manager = CheckpointManager(path / "ours", keep=1)

    def stock() -> None:
        found = state_of(model, optimizer)
        dcp.load(found, checkpoint_id=path / "kept")
        set_model_state_dict(model, found["model"])
        set_optimizer_state_dict(model, optimizer, found["optimizer"])

    seconds: Rounds = {"stock": [], "ours": []}
    for number in range(rounds + 1):
        found = {"stock": timed(stock), "ours": timed(lambda: manager.restore(state))}
        for name, value in found.items() if number else ():
            seconds[name].append(value)
    return seconds


def keep_both(rank: int, world_size: int, path: Path) -> None:
    """One checkpoint of each kind, to be loaded."""
    warnings.simplefilter("ignore")
    model, optimizer = build(world_size)
    dcp.save(state_of(model, optimizer), checkpoint_id=path / "kept")
    with CheckpointManager(path / "ours", keep=1) as manager:
        manager.save(1, TrainingState(model, optimizer))


def slowest(ranks: list[Rounds]) -> Rounds:
    return {name: [max(values) for values in zip(*(one[name] for one in ranks), strict=True)] for name in ranks[0]}


def ratio(seconds: Rounds, name: str, other: str) -> str:
    ratios = [a / b for a, b in zip(seconds[name], seconds[other], strict=True)]
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"


def report_saving(path: Path, rounds: int) -> None:
    seconds = slowest(run_ranks(2, saving, path, rounds, timeout=240.0))
    for name, values in seconds.items():
        print(f"{name:28} {statistics.median(values) * 1e3:8.0f} ms")
    print("stall / stock save          ", ratio(seconds, "ours, stall", "stock save"))
    print("stall / stock async_save    ", ratio(seconds, "ours, stall", "stock async_save, stall"))
    print("whole save, stock / ours    ", ratio(seconds, "stock save", "ours, whole"))


def report_memory(path: Path) -> None:
    ours = run_ranks(2, memory, path, timeout=120.0, isolated=True)[0]
    stock = run_ranks(2, stock_memory, path, timeout=120.0, isolated=True)[0]
    size = ours["sharded state"]
    print(f"sharded state of a rank: {size / 2**20:.0f} MiB; extra memory during an async save / that:")
    print(f"  ours {ours['ours'] / size:.2f}, stock {stock['stock'] / size:.2f}")


def report_loading(path: Path, rounds: int, worlds: list[int]) -> None:
    run_ranks(2, keep_both, path, timeout=120.0)
    for world_size in worlds:
        seconds = slowest(run_ranks(world_size, loading, path, rounds, timeout=240.0, isolated=True))
        times = ", ".join(f"{name} {statistics.median(values) * 1e3:.0f} ms" for name, values in seconds.items())
        print(f"2 ranks -> {world_size}: {times}; ours / stock {ratio(seconds, 'ours', 'stock')}")


# -- planning ---------------------------------------------------------------------------------------------------------


def plan_for(ranks: int) -> str:
    """One line: seconds of planning for a model of 32 parameters with AdamW (96 tensors), on so many ranks."""
    shapes = {f"layers.{n}.weight": (8192, 64) if n % 2 else (16384,) for n in range(96)}
    mesh_of = tuple(range(ranks))
    layouts = [
        (number, Layout(("model", name), torch.float32, shape, (Shard(0),), (ranks,), mesh_of))
        for number, (name, shape) in enumerate(shapes.items())
    ]
    plans = _stock_plans(layouts, ranks)
    wire = [pickle.dumps(plan) for plan in plans]
    begin = time.perf_counter()
    plans = [pickle.loads(data) for data in wire]  # as they reach the coordinator
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    final, _ = planner.create_global_plan(plans)
    for plan in final:
        pickle.dumps(plan)  # as they leave it
    stock = time.perf_counter() - begin
    del plans, final

    first, again, stock_local = _local(shapes, ranks)
    pieces = pieces_by_rank(layouts)
    parts = []
    for rank in range(ranks):
        _, end = chunks_after(0, "", pieces.get(rank, ()))
        parts.append(Part(end, ("0" * 32,) * -(-end // BLOCK_BYTES), (), (), ()))
    begin = time.perf_counter()
    index = build_index(Header(1, ranks, {}), layouts, parts)
    pack(index, "")
    stock_metadata(index)
    background = time.perf_counter() - begin
    return (
        f"{ranks:6} {stock_local * 1e3 + stock * 1e3:12.0f} {sum(map(len, wire)) / 1e6:10.1f} "
        f"{first * 1e3:10.1f} {again * 1e3:10.1f} {background * 1e3:12.0f}"
    )


def pieces_by_rank(layouts: list[tuple[int, Layout]]) -> dict[int, list[Piece]]:
    """The pieces that each rank writes, in the order in which it writes."""
    pieces: dict[int, list[Piece]] = {}
    for number, layout in layouts:
        for rank, offsets, sizes in layout.boxes(number):
            pieces.setdefault(rank, []).append(Piece(layout.path, layout.dtype, layout.shape, offsets, sizes))
    return pieces


def _stock_plans(layouts: list[tuple[int, Layout]], ranks: int) -> list[SavePlan]:
    """The plan that each rank would send to stock's coordinator."""
    items: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for rank, below in pieces_by_rank(layouts).items():
        for piece in below:
            name = ".".join(map(str, piece.path))
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
            data = TensorWriteData(chunk, TensorProperties(dtype=piece.dtype), torch.Size(piece.shape))
            items[rank].append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return [SavePlan(one, planner_data={item.index.fqn: (item.index.fqn,) for item in one}) for one in items]


def _local(shapes: dict[str, tuple[int, ...]], ranks: int) -> tuple[float, float, float]:
    """Seconds that a rank plans for itself: ours at first and again, stock; on torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    state = {
        name: DTensor.from_local(
            torch.empty(-(-shape[0] // ranks), *shape[1:]),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
        for name, shape in shapes.items()
    }
    leaves = Leaves({("model", name): value for name, value in state.items()})
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        layouts_digest(leaves.values)
        make_plan(Captured(leaves, Leaves()), ranks // 2, by_layout=True)
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    create_default_local_save_plan(state, is_coordinator=False)
    stock = time.perf_counter() - begin
    dist.destroy_process_group()
    return times[0], times[1], stock


def report_planning(worlds: list[int]) -> None:
    print(" ranks   stock, ms    sent, MB  ours, ms   again, ms   rank 0 later, ms")
    for ranks in worlds:
        print(plan_for(ranks), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--what", nargs="+", default=["saving", "memory", "loading"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4], help="ranks that load")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512, 4096], help="ranks to plan for")
    options = parser.parse_args()
    if "planning" in options.what:
        report_planning(options.ranks)
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as name:
        path = Path(name)
        if "saving" in options.what:
            report_saving(path, options.rounds)
        if "memory" in options.what:
            report_memory(path)
        if "loading" in options.what:
            report_loading(path, options.rounds, options.worlds)


if __name__ == "__main__":
    # The ranks find functions by the name of this module, not as part of a script.
    from benchmarks import checkpoints

    checkpoints.main()
