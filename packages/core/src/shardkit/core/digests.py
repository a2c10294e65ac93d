"""Numbers that stand for values, so that ranks can compare theirs with a few bytes."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import torch

_SAMPLES = 1024


def number_of(data: bytes | memoryview) -> int:
    """A 60-bit number for some bytes."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 4


def numbers_of(tensors: Sequence[torch.Tensor], *, whole: bool = False) -> list[int]:
    """A 60-bit number for each plain tensor, from up to 1,024 evenly spread elements, or from all.

    Parameters of different modules differ nearly everywhere, and a full hash would cost more than a copy.
    """
    flats = [tensor.detach().reshape(-1) for tensor in tensors]
    samples = (
        (_bytes_of(flat).cpu() for flat in flats) if whole else _on_cpu([_bytes_of(_spread(one)) for one in flats])
    )
    return [number_of(one.numpy().data) for one in samples]


def _spread(flat: torch.Tensor) -> torch.Tensor:
    # An odd stride does not stay in one column of a matrix.
    return flat[:: -(-flat.numel() // _SAMPLES) | 1].contiguous()


def _bytes_of(flat: torch.Tensor) -> torch.Tensor:
    # view(dtype) would check the stride of a single element, which may be any.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _on_cpu(samples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies all samples of a device at once, because each copy would wait for the device."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for number, one in enumerate(samples):
        by_device[one.device].append(number)
    found = list(samples)
    for device, numbers in by_device.items():
        if device.type != "cpu":
            together = torch.cat([samples[number] for number in numbers]).cpu()
            for number, one in zip(numbers, together.split([samples[n].numel() for n in numbers]), strict=True):
                found[number] = one
    return found
