"""In which dtypes parameters and optimizer state are kept, counted by hand."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES
from shardkit.tools import Policies, TrainingJob, estimate_job
from shardkit.tools.estimating.job import Precision
from shardkit.tools.estimating.trace import Ran
from shardkit.tools.machine import MachineError

ELEMENTS = 64 * 64 * 4


def job(precision: Precision) -> TrainingJob:
    return TrainingJob(
        lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))),
        lambda: torch.rand(2, 64, dtype=precision.parameters or torch.float32),
        policies=Policies(param_dtype=torch.bfloat16),
        precision=precision,
    )


def state(precision: Precision) -> tuple[int, int, dict[str, str]]:
    """Bytes of weights and of optimizer state of all ranks, without Adam's step counts; the dtypes."""
    found = estimate_job(job(precision), 2, "h100")
    counts = 4 * 4  # one number in float32 for each parameter
    return found.recording.sizes.whole_weights, found.recording.sizes.whole_optimizer - counts, found.dtypes


def test_the_state_of_the_optimizer_follows_what_the_script_does():
    weights, moments, dtypes = state(Precision())
    assert (weights, moments) == (4 * ELEMENTS, 2 * 4 * ELEMENTS)
    assert dtypes == {
        "parameters": "float32",
        "optimizer state": "float32",
        "computation": "bfloat16",
        # `reduce_dtype=None` has meant the parameters' `grad_dtype` since torch 2.15.
        "reduction": "float32" if GRAD_DTYPE_DECIDES else "bfloat16",
    }
    half = Precision(parameters=torch.bfloat16)
    assert state(half)[:2] == (2 * ELEMENTS, 2 * 2 * ELEMENTS)
    master = Precision(parameters=torch.bfloat16, master_weights=True)
    assert state(master)[:2] == (2 * ELEMENTS, (2 * 4 + 4) * ELEMENTS)
    small = Precision(optimizer=torch.bfloat16)
    weights, moments, dtypes = state(small)
    assert (weights, moments, dtypes["optimizer state"]) == (4 * ELEMENTS, 2 * 2 * ELEMENTS, "bfloat16")


def in_float8(enabled: bool) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    if enabled:
        float8 = pytest.importorskip("torchao.float8")
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        float8.convert_to_float8_training(model, config=config)
    return model


def test_float8_gathers_a_byte_for_each_element_and_has_a_rate_of_its_own():
    """Torchao's training in float8, in a factory, as a script would apply it."""
    found = {}
    for enabled in (False, True):
        job = TrainingJob(partial(in_float8, enabled), lambda: torch.rand(2**16, 1024, dtype=torch.bfloat16))
        wrapped = Policies(wrap=("Linear", "Float8Linear")[enabled:][:1], param_dtype=torch.bfloat16)
        found[enabled] = estimate_job(replace(job, policies=wrapped), 8, "h100")
    plain, cast = ({row.bytes for row in one.traffic if row.collective == "all-gather"} for one in found.values())
    assert max(plain) == 2 * 1024**2 and max(cast) == 1024**2
    for enabled, one in found.items():
        ran = [step.operator for step in one.recording.trace.steps if isinstance(step, Ran)]
        assert {each.dtype.itemsize for each in ran if each.flops} == {1 if enabled else 2}
    with pytest.raises(MachineError, match="FLOP/s in float8_e4m3fn"):
        estimate_job(replace(job, policies=wrapped), 8, "a100")
