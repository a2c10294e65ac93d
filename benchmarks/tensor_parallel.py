"""Data and tensor parallelism on a 2x2 mesh of four ranks: `python -m benchmarks.tensor_parallel`.

A training step, saving and loading of a network of 12 blocks of two matrices, 13 MiB in all, cut by rows and by columns
over the tensor-parallel ranks. shardkit and stock are timed in turn, on the same ranks.
"""

import functools
import tempfile
from collections.abc import Callable
from statistics import median, quantiles
from types import ModuleType

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit.core
from benchmarks.turns import Seconds, in_turn, ratio, slowest, table
from tests.support import rank_mesh, run_ranks
from tests.support.sharding import shard_each

ENGINES = {"shardkit": shardkit.core, "stock": stock}


def network(engine: ModuleType) -> nn.Module:
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Sequential(nn.Linear(192, 768), nn.Linear(768, 192)) for _ in range(12)))
    for block in made:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return shard_each(*made, made, api=engine, mesh=mesh["dp"])


def step_of(model: nn.Module) -> Callable[[], None]:
    """Forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(64, 192)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(rank: int, world_size: int, directory: str) -> tuple[dict[str, Seconds], dict[str, int]]:
    """Seconds by what is done, and how many collectives redistribute tensors during a save."""
    turns = functools.partial(in_turn, rounds=12, warmup=3)
    networks = {name: network(engine) for name, engine in ENGINES.items()}
    seconds = {"step": turns({name: step_of(one) for name, one in networks.items()})}
    states = {name: one.state_dict() for name, one in networks.items()}
    for call in (dcp.save, dcp.load):
        calls = {
            name: functools.partial(call, one, checkpoint_id=f"{directory}/{name}") for name, one in states.items()
        }
        seconds[call.__name__] = turns(calls)
    collectives = {}
    for name, one in networks.items():
        with CommDebugMode() as communication:
            dcp.save(one.state_dict(), checkpoint_id=f"{directory}/{name}")
        counts = communication.get_comm_counts().items()
        collectives[name] = sum(count for op, count in counts if "functional" in str(op))
    return seconds, collectives


def milliseconds(values: list[float]) -> str:
    """The median, and the interquartile range."""
    first, _, third = quantiles(values)
    return f"{median(values) * 1e3:.0f} ({(third - first) * 1e3:.0f})"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        found = run_ranks(4, measured, directory, timeout=240.0, isolated=True)
    rows = []
    for what in found[0][0]:
        seconds = slowest([ranks[what] for ranks, _ in found])
        compared = ratio(seconds["shardkit"], seconds["stock"])
        rows.append([what, *(milliseconds(seconds[name]) for name in ENGINES), str(compared)])
    print(table(["ms (interquartile range)", *ENGINES, "ratio [least-most]"], rows))
    print("collectives that redistribute tensors during a save:", {n: max(one[n] for _, one in found) for n in ENGINES})


if __name__ == "__main__":
    # The ranks find functions by the name of this module, not as part of a script.
    from benchmarks import tensor_parallel

    tensor_parallel.main()
