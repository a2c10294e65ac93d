"""In which dtypes parameters and optimizer state are kept, counted by hand."""

import torch
from torch import nn

from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES
from shardkit.tools import Policies, TrainingJob, estimate_job
from shardkit.tools.estimating.job import Precision

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
