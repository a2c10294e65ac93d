"""How many bytes this rank holds in sharded parameters, their gradients, optimizer state and buffers, and resident."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["Residence", "local_bytes", "optimizer_bytes", "parameters_of"]


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this rank's part of each tensor."""
    return sum(_local(tensor).nbytes for tensor in tensors)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameters_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Every parameter that some optimizer steps, once."""
    found: dict[int, nn.Parameter] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update((id(parameter), parameter) for parameter in group["params"])
    return list(found.values())


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of the tensors of all optimizers' states on this rank."""
    return sum(local_bytes(_tensors(state)) for optimizer in optimizers for state in optimizer.state.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


class Residence:
    """Reads what the process holds: resident memory on a CPU, elsewhere what the allocator has taken of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._file = os.open("/proc/self/statm", os.O_RDONLY) if device.type == "cpu" else -1
        self._page = os.sysconf("SC_PAGESIZE")

    def read(self) -> int:
        """Bytes that are held now."""
        if self._module is not None:
            return int(self._module.memory_reserved(self._device))
        return int(os.pread(self._file, 64, 0).split()[1]) * self._page

    def close(self) -> None:
        """Gives the file back. Closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
