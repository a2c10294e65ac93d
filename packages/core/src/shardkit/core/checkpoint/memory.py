"""The bytes that a tensor lies in."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["bytes_of", "memory_of"]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 view."""
    assert tensor.is_contiguous(), f"strides {tensor.stride()} of {tuple(tensor.shape)}: memory of others lies between"
    # A single element is contiguous whatever its strides say, and view(dtype) looks at these.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The same of a CPU tensor, to be read from and written to."""
    flat: Any = bytes_of(tensor).numpy()
    return memoryview(flat)
