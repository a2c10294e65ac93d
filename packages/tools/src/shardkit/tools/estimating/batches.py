"""Micro-batches of another size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shardkit.core.tensors import map_tensors, tensors_in
from shardkit.tools.estimating.errors import EstimateError, explained
from shardkit.tools.estimating.job import TrainingJob
from shardkit.tools.torch_compat import FakeTensors

__all__ = ["micro_batch_of", "with_micro_batch"]


def with_micro_batch(job: TrainingJob, size: int) -> TrainingJob:
    """The same job, whose micro-batches hold `size` samples: dim 0 of every tensor that its inputs make."""
    return replace(job, inputs=_Resized(job.inputs, size))


def micro_batch_of(job: TrainingJob) -> int:
    """How many samples the job's own micro-batches hold: dim 0 of the first tensor that has one.

    Raises:
        EstimateError: if its inputs cannot be made, or hold no such tensor.
    """
    with FakeTensors(), explained("making the inputs failed", "the function is called without arguments"):
        sizes = [tensor.shape[0] for tensor in tensors_in(job.inputs()) if tensor.dim()]
    if not sizes:
        raise EstimateError(
            "the inputs hold no tensor with a dim for samples; say what a micro-batch is (--micro-batch)"
        )
    return int(sizes[0])


class _Resized:
    def __init__(self, inputs: Callable[[], Any], size: int) -> None:
        self._inputs, self._size = inputs, size

    def __call__(self) -> Any:
        return map_tensors(self._resized, self._inputs())

    def _resized(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_zeros((self._size, *tensor.shape[1:])) if tensor.dim() else tensor
