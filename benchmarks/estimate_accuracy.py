"""How close estimates come: ten training jobs, predicted with fake tensors and measured on fresh gloo ranks here.

    python benchmarks/estimate_accuracy.py --ranks 1 2 --json accuracy.json
    MALLOC_MMAP_THRESHOLD_=262144 python benchmarks/estimate_accuracy.py --ranks 2 --uncounted

For each job: bytes of tensors at the peak, resident memory, collectives and bytes on the wire, and the time of a step.
The machine is calibrated first, with as many ranks; operators are timed in one process. The ranks inherit the
environment, and so does the estimate.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measured_costs import MeasuredCosts
from shardkit.tools import Policies, estimate_job
from shardkit.tools.calibration import calibrate
from shardkit.tools.estimating.hf import job_from_config
from shardkit.tools.machine import load_machine
from tests.tools import jobs
from tests.tools.measured import run_job

SIZES = {"width": 384, "batch": 4, "sequence": 64, "vocabulary": 2048}
STEPS = 8


def resident(reset: bool = False) -> int:
    """The most resident memory of this process since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def timed_rank(rank: int, ranks: int, name: str, directory: str) -> None:
    """Trains in a fresh process without anything that measures, but a clock and the kernel's high-water mark."""
    jobs.enlarge(**SIZES)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    job, axes = jobs.JOBS[name], jobs.mesh_of(name, ranks)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = job.build(mesh)
    optimizer = job.optimizer(model.parameters())
    seconds = []
    for step in range(STEPS):
        batches = [job.inputs() for _ in range(job.policies.accumulate)]
        if step == 3:
            resident(reset=True)
        dist.barrier()
        started = time.perf_counter()
        job.run(model, optimizer, batches)
        seconds.append(time.perf_counter() - started)
    found = {"seconds": statistics.median(seconds[3:]), "resident": resident()}
    (Path(directory) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def counted_rank(rank: int, ranks: int, name: str, directory: str) -> None:
    """Counts the bytes of live tensors and core's communication."""
    jobs.enlarge(**SIZES)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    found = run_job(rank, ranks, name, shared=True)
    (Path(directory) / f"{rank}.json").write_text(json.dumps({"peak": found.peak, "sent": found.communication}))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(body, ranks: int, name: str) -> dict:
    """The results of rank 0, with the step time of the slowest rank."""
    with tempfile.TemporaryDirectory() as directory:
        spawn(body, (ranks, name, directory), nprocs=ranks)
        found = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {**found[0], **({"seconds": max(one["seconds"] for one in found)} if "seconds" in found[0] else {})}


def row(name: str, ranks: int, machine, costs, *, counted: bool) -> dict:
    started = time.process_time()
    with costs or nullcontext():
        estimated = estimate_job(jobs.JOBS[name], jobs.mesh_of(name, ranks), machine, costs=costs)
    spent = time.process_time() - started
    timed = on_ranks(timed_rank, ranks, name)
    found = {
        "job": name,
        "ranks": ranks,
        "resident": [estimated.reserved_bytes, timed["resident"]],
        "step": [estimated.timeline.step, timed["seconds"]],
        "estimating_seconds": spent,
    }
    if not counted:
        return found
    counts = on_ranks(counted_rank, ranks, name)
    sent = [
        [one.collective, one.fqn, one.bytes, one.wire_bytes, str(one.dtype)]
        for one in estimated.recording.trace.transfers
        if one.of_core
    ]
    return found | {
        "peak": [estimated.peak.bytes, counts["peak"]],
        "collectives": [len(sent), len(counts["sent"])],
        "exact": sent == counts["sent"],
    }


def described(found: dict) -> str:
    """A row as a line."""

    def against(what: str, unit: float, name: str) -> str:
        predicted, measured = found[what]
        return f"  {what} {measured / unit:8.1f} {name} {predicted / measured - 1:+7.2%}"

    line = f"{found['job']:16} {found['ranks']}{against('resident', 2**20, 'MiB')}{against('step', 1e-3, 'ms')}"
    if "peak" in found:
        sent = "exact" if found["exact"] else found["collectives"]
        line += f"{against('peak', 2**20, 'MiB')}  collectives {sent}"
    return line


LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def large() -> None:
    """Estimates Llama-3-70B's shape on 1,024 ranks, with recomputation."""
    policies = Policies(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, checkpoint=True)
    started, spent = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(LLAMA_70B))
        found = estimate_job(job_from_config(path, 1, 4096, torch.optim.AdamW, policies), 1024)
    seconds, spent = time.perf_counter() - started, time.process_time() - spent
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{found.parameters / 1e9:.1f} billion parameters on 1024 ranks: {seconds:.0f} s ({spent:.0f} s of CPU time)")
    print(f"most memory of this process: {most:.2f} GiB")
    print(f"peak of {found.peak.bytes / 2**30:.1f} GiB in {found.peak.phase} of '{found.peak.fqn}'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--jobs", nargs="+", default=list(jobs.JOBS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--machine", type=Path, help="a description, in place of calibration and of timing operators")
    parser.add_argument("--uncounted", action="store_true", help="resident memory and time only")
    parser.add_argument("--large", action="store_true", help="only estimates a large model, and times that")
    options = parser.parse_args()
    if options.large:
        large()
        return
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    jobs.enlarge(**SIZES)
    rows = []
    for ranks in options.ranks:
        if options.machine is None:
            machine = calibrate(ranks, "cpu")
            costs = MeasuredCosts(machine)
        else:
            machine = load_machine(options.machine)
            costs = None
        print(json.dumps(machine.to_json()))
        for name in options.jobs:
            rows.append(row(name, ranks, machine, costs, counted=not options.uncounted))
            print(described(rows[-1]), flush=True)
    steps = [abs(one["step"][0] / one["step"][1] - 1) for one in rows]
    print(f"median error of the step: {statistics.median(steps):.1%}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
