"""Memory: estimated against measured, with communication, on jobs of eleven kinds; the caching allocator."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardkit.tools import TrainingJob, estimate_job
from shardkit.tools.estimating.memory import CachingAllocator
from shardkit.tools.machine import preset
from tests.support import run_ranks
from tests.tools.jobs import JOBS, mesh_of
from tests.tools.measured import run_job


def cpu(transport: str):
    return preset("h100").replace(device="cpu", transport=transport, flops={"float32": 1e11, "bfloat16": 1e11})


# Every job on one number of ranks, and the first of all on each.
CASES = [(name, (2, 4, 3, 2)[i % 4]) for i, name in enumerate(JOBS)]


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *CASES,
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("gpt", 1), ("gpt", 4), ("gpt", 3), ("replicas", 4))),
    ],
)
def test_peak_of_tensor_bytes_and_communication(name: str, world_size: int):
    shared = world_size != 3 and name != "compressed"  # shared memory leaves nothing to compress
    measured = run_ranks(world_size, run_job, name, shared)
    machine = cpu("shared" if shared else "gloo")
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
    predicted = estimated.peak.bytes - recorded.outbox_bytes
    assert predicted == pytest.approx(measured[rank].peak - outbox, rel=0.001), (estimated.peak, measured[rank].at)


def test_memory_on_a_cpu_is_that_of_tensors_and_a_note_says_what_is_left_out():
    job = TrainingJob(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), lambda: torch.rand(3, 64))
    found = estimate_job(job, 2, cpu("gloo").replace(process_bytes=7))
    assert found.reserved_bytes == found.peak.bytes + 7
    assert "free memory that the C library's heap keeps is not counted" in found.notes[0]


def test_reserved_memory_does_not_count_what_dtensor_imagines_in_the_first_step():
    job = TrainingJob(lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), lambda: torch.rand(4, 512))
    found = estimate_job(job, 64, "h100")
    assert found.memory.reserved < 1.5 * found.peak.bytes + 2**25  # beside segments of 20 MiB


def wide_head() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64, bias=False), nn.Linear(64, 4096, bias=False))


def test_the_peak_is_told_by_what_it_turned_out_to_be():
    job = TrainingJob(wide_head, lambda: torch.rand(2, 16), optimizer=torch.optim.SGD)
    peak = estimate_job(job, 2, cpu("nccl")).peak
    matrices = 4 * (64 * 16 + 4096 * 64)
    assert peak.phase == "backward"
    assert peak.by_category["sharded_parameters"] == matrices // 2
    assert peak.by_category["unsharded_parameters"] == matrices
    # Backward has just made the head's gradient, which is found to be one only afterwards. Activations are the gradient
    # of the head's output, its input and that one's gradient, the loss and its gradient.
    assert peak.by_category["gradients"] == 4 * 4096 * 64
    assert peak.by_category["activations"] == 4 * (2 * 4096 + 2 * (2 * 64) + 2)
    assert sum(peak.by_category.values()) == peak.bytes


def test_a_peak_in_the_loss_is_not_told_of_a_module():
    job = TrainingJob(wide_head, lambda: torch.rand(2, 16), optimizer=torch.optim.SGD)
    job = replace(job, loss=lambda output, batch: output.repeat(1, 50).relu_().sum())
    peak = estimate_job(job, 2, cpu("gloo")).peak
    assert (peak.fqn, peak.phase) == ("", "backward")


MIB = 2**20


def reserved_after(*changes: tuple[int, int], expandable: bool = False) -> int:
    allocator = CachingAllocator(expandable)
    for key, nbytes in changes:
        allocator.changed(key, nbytes)
    return allocator.reserved


def test_segments_have_the_documented_sizes():
    assert reserved_after((1, 100)) == 2 * MIB
    assert reserved_after((1, MIB + 1)) == 20 * MIB
    assert reserved_after((1, 10 * MIB)) == 10 * MIB
    assert reserved_after((1, 11 * MIB)) == 12 * MIB
    assert reserved_after((1, 100), (2, 2 * MIB)) == 22 * MIB, "small and large requests share no segment"


def test_a_freed_block_is_used_again_and_joins_its_neighbours():
    halves = [(1, 9 * MIB), (2, 9 * MIB)]
    assert reserved_after(*halves) == 20 * MIB
    assert reserved_after(*halves, (1, 0), (3, 9 * MIB)) == 20 * MIB
    assert reserved_after(*halves, (1, 0), (2, 0), (3, 18 * MIB)) == 20 * MIB
    assert reserved_after(*halves, (1, 0), (3, 10 * MIB)) == 30 * MIB


def test_expandable_segments_grow_at_their_end_by_pages():
    assert reserved_after((1, 100), expandable=True) == 2 * MIB
    assert reserved_after((1, 11 * MIB), expandable=True) == 20 * MIB
    assert reserved_after((1, 11 * MIB), (2, 9 * MIB), expandable=True) == 20 * MIB
    assert reserved_after((1, 11 * MIB), (2, 10 * MIB), expandable=True) == 40 * MIB
    assert reserved_after((1, 30 * MIB), (1, 0), (2, 50 * MIB), expandable=True) == 60 * MIB  # segments: 80


def test_holes_are_filled_before_the_end_is_used():
    kept = [(1, 30 * MIB), (2, 10 * MIB), (3, 5 * MIB), (1, 0)]  # a hole of 30, and 15 free behind the third
    assert reserved_after(*kept, (4, 14 * MIB), (5, 15 * MIB), expandable=True) == 60 * MIB
    assert reserved_after(*kept, (4, 31 * MIB), expandable=True) == 80 * MIB
