"""Stock's own estimator, `torch.distributed._tools`, on the jobs of `tests/tools/jobs.py`, against stock's own ranks.

    python benchmarks/stock_estimates.py --ranks 2

`FSDPMemTracker` estimates memory. It is compared with the same measurement as our estimates: every live storage after
every operator. Stock's estimators of time (`RuntimeEstimator`, `SACEstimator`) run on CUDA only.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shardkit.tools import TrainingJob
from shardkit.tools.estimating.job import blocks_of, call, default_loss
from shardkit.tools.torch_compat import FakeTensors, join_fake_world
from tests.tools import jobs
from tests.tools.measured import Meter

ITERATIONS = 3


def build(job: TrainingJob, mesh: DeviceMesh) -> torch.nn.Module:
    """The job's model, sharded by stock with the same settings."""
    # Fake tensors do not support pinning.
    offload = partial(CPUOffloadPolicy, pin_memory=False)
    with mock.patch.multiple(jobs, fully_shard=fully_shard, CPUOffloadPolicy=offload):
        try:
            model = job.model()
        except TypeError:
            return job.model(mesh)
    policies = job.policies
    precision = MixedPrecisionPolicy(policies.param_dtype, policies.reduce_dtype)
    for _, block in blocks_of(model, policies.wrap):
        if policies.checkpoint:
            forward = block.forward
            block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
        reshard = policies.reshard_after_forward
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=True if reshard is None else reshard)
    return fully_shard(model, mesh=mesh, mp_policy=precision)


def step(job: TrainingJob, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batches = [job.inputs() for _ in range(job.policies.accumulate)]
    for number, batch in enumerate(batches, 1):
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(number == len(batches))
        default_loss(call(model, batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def measured_rank(rank: int, ranks: int, name: str, sizes: dict[str, int], directory: str) -> None:
    jobs.enlarge(**sizes)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    job, axes = jobs.JOBS[name], jobs.mesh_of(name, ranks)
    with Meter() as meter:
        model = build(job, init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)))
        optimizer = job.optimizer(model.parameters())
        for _ in range(ITERATIONS):
            meter.peak = 0
            step(job, model, optimizer)
    (Path(directory) / f"{rank}.json").write_text(json.dumps(meter.peak))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, ranks: int, sizes: dict[str, int]) -> int:
    """Most bytes of tensors of rank 0, trained with stock."""
    with tempfile.TemporaryDirectory() as directory:
        spawn(measured_rank, (ranks, name, sizes, directory), nprocs=ranks)
        return json.loads((Path(directory) / "0.json").read_text())


@contextlib.contextmanager
def fake_world(name: str, ranks: int) -> Iterator[DeviceMesh]:
    axes = jobs.mesh_of(name, ranks)
    join_fake_world(0, ranks)
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()


def predict(name: str, ranks: int) -> int:
    """The estimate of stock's tracker for rank 0, in an iteration after the first; its exceptions pass through."""
    job = jobs.JOBS[name]
    with fake_world(name, ranks) as mesh, FakeTensors() as fake:
        model = build(job, mesh)
        fake.forget()
        optimizer = job.optimizer(model.parameters())
        for _ in range(2):
            tracker = FSDPMemTracker(model, optimizer)
            with tracker:
                step(job, model, optimizer)
        return sum(each["Total"] for each in tracker.get_tracker_snapshot("peak").values())


def row(name: str, ranks: int, sizes: dict[str, int]) -> dict[str, object]:
    """Predicted and measured bytes, or why there are none."""
    try:
        predicted = predict(name, ranks)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return {"job": name, "ranks": ranks, "error": f"{type(error).__name__}: {error}".strip().split("\n")[0][:160]}
    return {"job": name, "ranks": ranks, "peak": [predicted, measure(name, ranks, sizes)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", nargs="+", default=[name for name in jobs.JOBS if name != "compressed"])
    options = parser.parse_args()
    sizes = {"width": 384, "batch": 4, "sequence": 64, "vocabulary": 2048}
    torch.set_num_threads(1)
    jobs.enlarge(**sizes)
    for name in options.jobs:
        found = row(name, options.ranks, sizes)
        if "error" in found:
            print(f"{name:16} {found['error']}", flush=True)
            continue
        predicted, peak = found["peak"]
        print(f"{name:16} peak {peak / 2**20:8.1f} MiB {predicted / peak - 1:+7.2%}", flush=True)


if __name__ == "__main__":
    main()
