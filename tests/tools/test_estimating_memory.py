"""Estimated against measured memory and communication, on jobs of ten kinds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shardkit.tools import TrainingJob, estimate_job
from shardkit.tools.estimating.heap import MAPPED_FROM
from shardkit.tools.estimating.trace import Mapped
from shardkit.tools.machine import preset
from tests.support import run_ranks
from tests.tools import jobs
from tests.tools.jobs import JOBS, mesh_of
from tests.tools.measured import HUGE_PAGES, run_job


def cpu(transport: str):
    return preset("h100").replace(device="cpu", transport=transport, flops={"float32": 1e11, "bfloat16": 1e11})


# Every job on two ranks, and on one, three or four.
CASES = [(name, size) for i, name in enumerate(JOBS) for size in (2, (4, 3, 1)[i % 3])]


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *CASES,
        ("replicas", 4),
    ],
)
def test_peak_of_tensor_bytes_and_communication(name: str, world_size: int):
    shared = world_size != 3 and name != "compressed"  # shared memory leaves nothing to compress
    measured = run_ranks(world_size, run_job, name, shared)
    machine = cpu("shared" if shared else "pairwise")
    # Every job as the first rank of two, and as the last rank of another world, which may have smaller shards.
    rank = 0 if world_size == 2 else world_size - 1
    estimated = estimate_job(JOBS[name], mesh_of(name, world_size), machine, rank=rank)
    counted = [
        (one.collective, one.fqn, one.bytes, one.wire_bytes, str(one.dtype))
        for one in estimated.recording.trace.transfers
        if one.of_core
    ]
    assert counted == measured[rank].communication
    # How much the outbox holds depends on which rank was ahead; all else does not.
    recorded, outbox = estimated.recording, measured[rank].outbox
    assert outbox <= recorded.outbox_bytes + 64
    predicted = recorded.peak.bytes - recorded.outbox_bytes
    assert predicted == pytest.approx(measured[rank].peak - outbox, rel=0.001), (recorded.peak, measured[rank].at)


def equal_layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)))


def test_where_glibc_maps_large_blocks_resident_memory_is_that_of_tensors_and_elsewhere_a_note_warns():
    job = TrainingJob(equal_layers, lambda: torch.rand(300, 512))
    learnt = estimate_job(job, 2, cpu("pairwise").replace(process_bytes=0))
    fixed = estimate_job(job, 2, cpu("pairwise").replace(process_bytes=0, mmap_threshold=MAPPED_FROM))
    assert fixed.peak.bytes == learnt.peak.bytes
    assert fixed.reserved_bytes == pytest.approx(fixed.peak.bytes, rel=0.02)
    assert not fixed.notes and "MALLOC_MMAP_THRESHOLD_=262144" in learnt.notes[0]


# Faults of the third step, in a process of its own where glibc maps blocks from the beginning.
FAULTS = """
import resource, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tests.tools import jobs
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
jobs.enlarge(384, 4, 64, 2048)
job = jobs.JOBS[sys.argv[2]]
model = job.build(mesh)
optimizer = job.optimizer(model.parameters())
for _ in range(3):
    batches = [job.inputs()]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    job.run(model, optimizer, batches)
    found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(found)
"""


@pytest.mark.skipif(HUGE_PAGES, reason="transparent_hugepage is 'always': a fault is not a page of 4 KiB")
@pytest.mark.parametrize("name", ["gpt", "checkpointing"])
def test_pages_that_the_kernel_clears_are_those_of_the_blocks_that_the_trace_tells(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for attribute, value in (("WIDTH", 384), ("BATCH", 4), ("SEQUENCE", 64), ("VOCABULARY", 2048)):
        monkeypatch.setattr(jobs, attribute, value)
    machine = cpu("shared").replace(mmap_threshold=MAPPED_FROM)
    found = estimate_job(JOBS[name], 1, machine)
    told = sum(step.bytes for step in found.recording.trace.steps if isinstance(step, Mapped)) // 4096
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MAPPED_FROM)}
    command = [sys.executable, "-c", FAULTS, str(tmp_path / "store"), name]
    real = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    assert int(real.stdout) == pytest.approx(told, rel=0.1)
    # The kernel's work on them is what the step is longer by, and nothing is charged elsewhere.
    longer = found.timeline.step - estimate_job(JOBS[name], 1, machine.replace(mmap_threshold=None)).timeline.step
    assert longer == pytest.approx(4096 * told / machine.mapping_bandwidth)
    for other in (machine.replace(mmap_threshold=None), machine.replace(device="cuda", transport="nccl")):
        assert not any(isinstance(step, Mapped) for step in estimate_job(JOBS[name], 1, other).recording.trace.steps)


def wide_head() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64, bias=False), nn.Linear(64, 4096, bias=False))


def test_the_peak_is_told_by_what_it_turned_out_to_be():
    job = TrainingJob(wide_head, lambda: torch.rand(2, 16), optimizer=torch.optim.SGD)
    peak = estimate_job(job, 2, cpu("pairwise")).recording.peak
    matrices = 4 * (64 * 16 + 4096 * 64)
    assert peak.phase == "backward"
    assert peak.by_category["sharded_parameters"] == matrices // 2
    assert peak.by_category["unsharded_parameters"] == matrices
    # The head's gradient makes the peak, and is found to be one only afterwards.
    assert peak.by_category["gradients"] == 4 * 4096 * 64
    assert sum(peak.by_category.values()) == peak.bytes


def long_loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.repeat(1, 50).relu_().sum()


def test_a_peak_in_the_loss_is_not_told_of_a_module():
    job = TrainingJob(wide_head, lambda: torch.rand(2, 16), optimizer=torch.optim.SGD, loss=long_loss)
    peak = estimate_job(job, 2, cpu("pairwise")).recording.peak
    assert (peak.fqn, peak.phase) == ("", "backward")
