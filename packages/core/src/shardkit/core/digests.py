"""Numbers that stand for values, so that ranks can compare theirs with a few bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import torch

from shardkit.core.tensors import bytes_of

_SAMPLES = 1024


def number_of(data: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 4


def numbers_of(tensors: Sequence[torch.Tensor], *, whole: bool = False) -> list[int]:
    """A 60-bit number for each plain tensor, from up to 1,024 evenly spread elements, or from all.

    Parameters of different modules differ nearly everywhere, and a full hash would cost more than a copy.
    """
    if whole:
        return [number_of(bytes_of(tensor.contiguous()).cpu().numpy().data) for tensor in tensors]
    numbers: list[int] = []
    for _, on_device in groupby(map(_sample, tensors), attrgetter("device")):
        samples = list(on_device)
        copies = torch.cat(samples).cpu().split([one.numel() for one in samples])  # at once: each copy waits
        numbers += [number_of(one.numpy().data) for one in copies]
    return numbers


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    # An odd stride does not stay in one column of a matrix.
    return bytes_of(flat[:: -(-flat.numel() // _SAMPLES) | 1].contiguous())
