"""CPU offload: what is on the host and in files, what remains on the device, and how long that takes."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardkit.core import FileTier, fully_shard, offload_activations, overlap_step
from shardkit.tools import Estimate, Machine, Policies, TrainingJob, estimate_job, preset
from shardkit.tools.estimating.trace import Entered
from tests.support import rank_mesh, run_ranks
from tests.tools.llama_shaped import LlamaShaped, few_tokens

KEPT = TrainingJob(partial(LlamaShaped, 32, 256, 640, 14, 4, 2), few_tokens)
OFFLOADED = TrainingJob(KEPT.model, few_tokens, policies=Policies(offload=True))
FEW = partial(LlamaShaped, 32, 256, 640, 4, 4, 2)  # where blocks are not taken to be alike


@cache
def on_two_ranks(offload: bool) -> Estimate:
    return estimate_job(OFFLOADED if offload else KEPT, 2)


def test_shards_gradients_and_optimizer_state_are_on_the_host():
    kept, offloaded = on_two_ranks(False), on_two_ranks(True)
    shards = 4 * kept.parameters / 2
    # Shards, gradients, and both states of AdamW, which makes some temporary tensors there.
    assert offloaded.host_bytes == pytest.approx(4 * shards, rel=0.03)
    assert kept.host_bytes == 0
    assert offloaded.peak.by_category["sharded_parameters"] == 0
    assert offloaded.idle_bytes < 0.001 * kept.idle_bytes  # AdamW's counters of steps
    assert offloaded.peak.bytes < kept.peak.bytes - 3 * shards + 0.1 * shards
    assert offloaded.reserved_bytes < kept.reserved_bytes - 2 * shards


def test_a_group_passes_through_the_device(monkeypatch):
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")  # from torch 2.15 on the other one packs what is kept, too
    kept, offloaded = (estimate_job(replace(job, model=FEW), 2) for job in (KEPT, OFFLOADED))
    (head,) = (row.bytes for row in offloaded.traffic if row.fqn == "layers.0" and row.phase == "forward")
    peaks = [one.peak.by_category["communication"] for one in (offloaded, kept)]
    assert peaks[0] >= head / 2 > peaks[1]


def test_blocks_that_are_not_run_are_offloaded_as_well():
    # The usual step; blocks are not taken to be alike where a job has a step of its own.
    whole = replace(OFFLOADED, step=lambda model, optimizer, batch: KEPT.run(model, optimizer, [batch]))
    short, full = on_two_ranks(True), estimate_job(whole, 2)
    assert any(isinstance(step, Entered) for step in short.recording.trace.steps)  # it ran a few blocks
    for name in ("peak", "host_bytes", "idle_bytes", "reserved_bytes"):
        assert getattr(short, name) == getattr(full, name)


def test_on_a_cpu_offload_changes_nothing():
    cpu = preset("h100").replace(device="cpu", transport="gloo")
    kept, offloaded = (estimate_job(replace(job, model=FEW), 2, cpu) for job in (KEPT, OFFLOADED))
    assert offloaded.peak == kept.peak and offloaded.host_bytes == 0


# -- tiers -------------------------------------------------------------------------------------------------------------

FUSED = partial(torch.optim.AdamW, fused=True)
H100 = preset("h100").replace(ranks_per_host=2)


def tiers(machine: Machine = H100, **policies: Any) -> Estimate:
    job = replace(KEPT, model=FEW, optimizer=FUSED, policies=Policies(offload=True, **policies))
    return estimate_job(job, 2, machine)


def test_a_step_on_the_host_moves_its_bytes_at_the_hosts_bandwidth():
    found = tiers()
    # Read and written: parameters, both states, and, as a GradScaler may ask for it, gradients.
    seconds = 8 * 4 * found.parameters / 2 / (H100.host_bandwidth / 2)
    assert found.timeline.host_step == pytest.approx(seconds, rel=0.01) == found.timeline.host_exposed
    # Shards go to the device for forward and backward, those of the last block and the root once; gradients come back.
    assert found.timeline.copies == pytest.approx((3 - 1 / 4) * 4 * found.parameters / 2 / H100.host_link, rel=0.01)


def test_a_step_under_the_next_forward_hides_what_forward_takes():
    slow = H100.replace(host_bandwidth=H100.host_bandwidth / 1000, host_link=1e15)
    plain, overlapped = tiers(slow).timeline, tiers(slow, overlap_step=True).timeline
    assert plain.host_step == overlapped.host_step > overlapped.host_exposed
    assert plain.step > overlapped.step >= plain.step - plain.host_step - plain.optimizer
    assert overlapped.host_exposed > 0.9 * overlapped.host_step  # forward is short beside a slow host's step
    plain, overlapped = (tiers(overlap_step=one, param_dtype=torch.bfloat16) for one in (False, True))
    assert overlapped.host_bytes - plain.host_bytes == pytest.approx(2 * plain.parameters / 2)  # cast by the step


def test_state_in_files_takes_the_time_of_the_disk():
    resident = 2**16
    slow = H100.replace(storage_bandwidth=1e6)
    memory, files = tiers(slow, overlap_step=True), tiers(slow, overlap_step=True, resident=resident)
    assert files.file_bytes == files.recording.sizes.own_optimizer
    assert memory.host_bytes - files.host_bytes == pytest.approx(files.file_bytes - resident, rel=1e-3)  # but counters
    assert files.timeline.host_step == (2 * files.file_bytes - resident) / 1e6 > memory.timeline.host_step
    assert not files.short_of and "of disks" in replace(files, machine=slow.replace(storage=1000)).short_of
    assert "of host memory" in replace(files, machine=slow.replace(host_memory=1000)).short_of


def _beyond_memory(rank: int, world_size: int, directory: Path) -> tuple[int, int]:
    """Bytes of activations, and of state, that are in files of this rank."""
    model = DEEP.model()
    for module in (*model.layers, model):
        fully_shard(module, mesh=rank_mesh((world_size,)))
    optimizer = FUSED(model.parameters())
    overlap_step(optimizer, states=FileTier(directory, resident=2**26)).wait()
    moved = offload_activations(model, directory=directory)
    KEPT.run(model, optimizer, [DEEP.inputs()])
    states = (one for state in optimizer.state.values() for one in state.values() if isinstance(one, DTensor))
    return moved.host_bytes, sum(one.to_local().nbytes for one in states)


DEEP = TrainingJob(FEW, partial(torch.randint, 32, (2, 2048)), optimizer=FUSED)


def test_bytes_in_tiers_are_those_of_a_run(tmp_path):
    policies = Policies(offload=True, overlap_step=True, resident=2**26, offload_activations=True)
    found = estimate_job(replace(DEEP, policies=policies), 2, H100)
    for activations, states in run_ranks(2, _beyond_memory, tmp_path):
        # Its pages are of 4 MiB each.
        assert found.host_by_category["activations"] == pytest.approx(activations, abs=3 * 2**22)
        assert found.file_bytes == pytest.approx(states, rel=0.001)
    kept = estimate_job(replace(DEEP, policies=replace(policies, offload_activations=False)), 2, H100)
    away = found.host_by_category["activations"]
    assert kept.peak.by_category["activations"] - found.peak.by_category["activations"] > away / 4
    assert found.timeline.copies - kept.timeline.copies == pytest.approx(2 * away / H100.host_link)
