"""Micro-batches of another size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shardkit.core.tensors import map_tensors
from shardkit.tools.estimating.job import TrainingJob

__all__ = ["with_micro_batch"]


def with_micro_batch(job: TrainingJob, size: int) -> TrainingJob:
    """The same job, whose micro-batches hold `size` samples: dim 0 of every tensor that its inputs make."""
    return replace(job, inputs=_Resized(job.inputs, size))


class _Resized:
    def __init__(self, inputs: Callable[[], Any], size: int) -> None:
        self._inputs, self._size = inputs, size

    def __call__(self) -> Any:
        return map_tensors(self._resized, self._inputs())

    def _resized(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_zeros((self._size, *tensor.shape[1:])) if tensor.dim() else tensor
