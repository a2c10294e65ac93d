"""CPU offload: what is on the host, and what remains on the device."""

from functools import partial

import pytest
import torch
from torch import nn

from shardkit.tools import Policies, TrainingJob, estimate_job, preset
from shardkit.tools.estimating.trace import Entered
from tests.tools.jobs import JOBS
from tests.tools.llama_shaped import LlamaShaped, few_tokens

KEPT = TrainingJob(partial(LlamaShaped, 32, 256, 640, 14, 4, 2), few_tokens)
OFFLOADED = TrainingJob(KEPT.model, few_tokens, policies=Policies(offload=True))


def in_one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """The usual step; blocks are not taken to be alike where a job has a step of its own."""
    KEPT.run(model, optimizer, [batch])


def test_shards_gradients_and_optimizer_state_are_on_the_host():
    kept, offloaded = (estimate_job(job, 2) for job in (KEPT, OFFLOADED))
    shards = 4 * kept.parameters / 2
    # Shards, gradients, and both states of AdamW, which makes some temporary tensors there.
    assert offloaded.host_bytes == pytest.approx(4 * shards, rel=0.03)
    assert kept.host_bytes == 0
    assert offloaded.peak.by_category["sharded_parameters"] == 0
    assert offloaded.idle_bytes < 0.001 * kept.idle_bytes  # AdamW's counters of steps
    assert offloaded.peak.bytes < kept.peak.bytes - 3 * shards + 0.1 * shards
    assert offloaded.reserved_bytes < kept.reserved_bytes - 2 * shards


def test_a_group_passes_through_the_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")  # from torch 2.15 on the other one packs what is kept, too
    (head,) = (
        row.bytes for row in estimate_job(OFFLOADED, 2).traffic if row.fqn == "layers.0" and row.phase == "forward"
    )
    peak = estimate_job(OFFLOADED, 2).peak.by_category
    assert peak["communication"] >= head / 2 > estimate_job(KEPT, 2).peak.by_category["communication"]


def test_blocks_that_are_not_run_are_offloaded_as_well():
    whole = TrainingJob(KEPT.model, few_tokens, policies=OFFLOADED.policies, step=in_one_step)
    short, full = estimate_job(OFFLOADED, 2), estimate_job(whole, 2)
    assert any(isinstance(step, Entered) for step in short.recording.trace.steps)  # it ran a few blocks
    for name in ("peak", "host_bytes", "idle_bytes", "reserved_bytes"):
        assert getattr(short, name) == getattr(full, name)


def test_a_factory_that_offloads_is_understood():
    assert estimate_job(JOBS["offloaded"], 2).host_bytes > 0


def test_on_a_cpu_offload_changes_nothing():
    cpu = preset("h100").replace(device="cpu", transport="gloo")
    kept, offloaded = (estimate_job(job, 2, cpu) for job in (KEPT, OFFLOADED))
    assert offloaded.peak == kept.peak and offloaded.host_bytes == 0
