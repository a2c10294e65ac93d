"""Checkpoints against stock's, in one run and in turn: `python -m benchmarks.checkpoints`.

A GPT of 34 M parameters with AdamW on two ranks, sharded by shardkit for both, so that both save the same tensors.
"""

import argparse
import gc
import itertools
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from benchmarks.side_by_side.meters import MemoryMeter
from benchmarks.side_by_side.networks import GPT
from benchmarks.turns import Seconds, in_turn, milliseconds, ratio, slowest
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from tests.support import rank_mesh, run_ranks
from tests.support.sharding import shard_each


def build(world_size: int) -> tuple[Any, torch.optim.Optimizer]:
    """The network and its optimizer, with state."""
    torch.manual_seed(0)
    model = GPT(vocabulary=8192, context=128, width=512, heads=8, hidden=(2048,) * 8)
    mesh = rank_mesh((world_size,), ("shard",))
    shard_each(*model.blocks, model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def saving(rank: int, world_size: int, path: Path, rounds: int) -> Seconds:
    """Stalls and whole saves, one after the other in each round; each begins when the one before is complete."""
    warnings.simplefilter("ignore")
    model, optimizer = build(world_size)
    state = TrainingState(model, optimizer)
    manager = CheckpointManager(path / "ours", keep=1)
    steps = itertools.count()
    pending: list[Any] = []

    def clean() -> None:
        if rank == 0:
            for name in ("save", "async"):
                shutil.rmtree(path / name)

    actions = {
        "stock save": lambda: dcp.save(state_of(model, optimizer), checkpoint_id=path / "save"),
        "stock async_save, stall": lambda: pending.append(
            dcp.async_save(state_of(model, optimizer), checkpoint_id=path / "async")
        ),
        "stock async_save, the rest": lambda: pending.pop().result(),
        "ours, stall": lambda: manager.save(next(steps), state),
        "ours, the rest": manager.wait,
        "ours, whole": lambda: manager.save(next(steps), state, blocking=True),
        "removal": clean,
    }
    seconds = in_turn(actions, rounds, warmup=1)
    del seconds["removal"]
    return seconds


def memory(rank: int, world_size: int, path: Path, ours: bool) -> tuple[int, int]:
    """Bytes of the sharded state, and those held at most during an asynchronous save beyond what was held before.

    Staging memory is included. Of ours, or of stock's `async_save`.
    """
    warnings.simplefilter("ignore")
    model, optimizer = build(world_size)
    state = TrainingState(model, optimizer)
    sharded = sum(
        value.to_local().nbytes if isinstance(value, DTensor) else value.nbytes
        for value in [*model.state_dict().values(), *(v for one in optimizer.state.values() for v in one.values())]
    )
    # Imports, and objects made on first use.
    if ours:
        with CheckpointManager(path / "warm") as small:
            small.save(0, TrainingState(torch.nn.Linear(1, 1)))
    else:
        dcp.async_save({"x": torch.ones(1)}, checkpoint_id=path / "warm").result()
    manager = CheckpointManager(path / "ours")
    gc.collect()

    def save() -> None:
        if ours:
            manager.save(1, state)
            manager.wait()
        else:
            dcp.async_save(state_of(model, optimizer), checkpoint_id=path / "stock").result()

    return sharded, MemoryMeter(torch.device("cpu")).held_during(save)


def loading(rank: int, world_size: int, path: Path, rounds: int) -> Seconds:
    warnings.simplefilter("ignore")
    model, optimizer = build(world_size)
    state = TrainingState(model, optimizer)
    manager = CheckpointManager(path / "ours", keep=1)

    def stock() -> None:
        found = state_of(model, optimizer)
        dcp.load(found, checkpoint_id=path / "kept")
        set_model_state_dict(model, found["model"])
        set_optimizer_state_dict(model, optimizer, found["optimizer"])

    return in_turn({"stock": stock, "ours": lambda: manager.restore(state)}, rounds, warmup=1)


def keep_both(rank: int, world_size: int, path: Path) -> None:
    """One checkpoint of each kind, to be loaded."""
    warnings.simplefilter("ignore")
    model, optimizer = build(world_size)
    dcp.save(state_of(model, optimizer), checkpoint_id=path / "kept")
    with CheckpointManager(path / "ours", keep=1) as manager:
        manager.save(1, TrainingState(model, optimizer))


def report_saving(path: Path, rounds: int) -> None:
    seconds = slowest(run_ranks(2, saving, path, rounds, timeout=240.0))
    for name, values in seconds.items():
        print(f"{name:28} {milliseconds(values):>8} ms")
    print("stall / stock save          ", ratio(seconds["ours, stall"], seconds["stock save"]))
    print("stall / stock async_save    ", ratio(seconds["ours, stall"], seconds["stock async_save, stall"]))
    print("whole save, stock / ours    ", ratio(seconds["stock save"], seconds["ours, whole"]))


def report_memory(path: Path) -> None:
    (size, ours), (_, stock) = (
        run_ranks(2, memory, path, one, timeout=120.0, isolated=True)[0] for one in (True, False)
    )
    print(f"sharded state of a rank: {size / 2**20:.0f} MiB; extra memory during an async save / that:")
    print(f"  ours {ours / size:.2f}, stock {stock / size:.2f}")


def report_loading(path: Path, rounds: int, worlds: list[int]) -> None:
    run_ranks(2, keep_both, path, timeout=120.0)
    for world_size in worlds:
        seconds = slowest(run_ranks(world_size, loading, path, rounds, timeout=240.0, isolated=True))
        times = ", ".join(f"{name} {milliseconds(values)} ms" for name, values in seconds.items())
        print(f"2 ranks -> {world_size}: {times}; ours / stock {ratio(seconds['ours'], seconds['stock'])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4], help="ranks that load")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as name:
        path = Path(name)
        report_saving(path, options.rounds)
        report_memory(path)
        report_loading(path, options.rounds, options.worlds)


if __name__ == "__main__":
    # The ranks find functions by the name of this module, not as part of a script.
    from benchmarks import checkpoints

    checkpoints.main()
