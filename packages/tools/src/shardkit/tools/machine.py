"""The performance of a cluster: arithmetic, memory, links. From JSON, a preset, or a measurement (`calibration`).

Presets are in `machines.json`, each number with its source. Peak numbers are those of data sheets; `efficiency` is the
part of them that programs reach.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from shardkit.tools.files import InputError, read_json

Transport: TypeAlias = Literal["nccl", "shared", "gloo"]
"""How core moves bytes there: NCCL in place, through memory that ranks of a host share, by gloo's collectives."""


class MachineError(InputError):
    """A description that is wrong, or lacks a required number."""


# Costs that may be zero.
_MAY_BE_ZERO = {"latency", "operator_seconds", "process_bytes", "collective_seconds"}
_MAY_BE_ZERO |= {"dtensor_seconds", "dtensor_each_seconds"}


def _check_numbers(described: Link | Machine) -> None:
    for name, value in vars(described).items():
        if type(value) not in (int, float):
            continue
        if not 0 <= value < math.inf or (not value and name not in _MAY_BE_ZERO):
            raise ValueError(f'"{name}" is {value}; expected a positive number')


@dataclass(frozen=True)
class Link:
    """The performance of one rank on one level of the network. Raises ValueError for numbers that are not positive.

    Attributes:
        bandwidth: bytes per second that a rank sends, while it receives as many.
        latency: seconds of one step of a ring.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True)
class Efficiency:
    """The part of the peak numbers that each class of operators reaches. Raises ValueError unless above 0, at most 1.

    Attributes:
        matmul: matrix products and convolutions, relative to `flops`.
        attention: fused attention, relative to `flops`.
        memory: everything else, relative to `memory_bandwidth`.
    """

    matmul: float
    attention: float
    memory: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value <= 1:
                raise ValueError(f'"{name}" is {value}; expected a part of the peak numbers, from 0 to 1')


@dataclass(frozen=True)
class Machine:
    """A cluster of equal hosts. Raises ValueError for numbers that are not positive, where zero is not allowed.

    Attributes:
        name: its name in reports.
        device: "cuda" for devices that work through a queue behind the host, "cpu" for ranks that compute themselves.
        transport: how core moves bytes.
        flops: floating-point operations per second of dense matrix products on one device, by dtype ("bfloat16").
        memory_bandwidth: bytes per second that one device reads and writes.
        memory: bytes of one device.
        ranks_per_host: number of devices of one host.
        inside: the link between ranks of one host.
        between: the link between ranks of different hosts; None if there is only one host.
        efficiency: the part of `flops` and of `memory_bandwidth` that programs reach.
        operator_seconds: host time of one operator; on a device with a queue, of its launch.
        storage_bandwidth: bytes per second that one rank writes to and reads from files.
        expandable_segments: whether ranks set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
        process_bytes: memory of a rank outside of tensors: context, libraries, communication.
        host_memory: bytes of memory of one host, beside that of its devices.
        host_bandwidth: bytes per second that the processors of a host read and write, for all ranks together.
        host_link: bytes per second that a rank copies between its device and pinned host memory, in each direction.
        storage: bytes of the disks of one host.
        collective_seconds: seconds of a collective besides its steps.
        dtensor_seconds: host time of an operator on DTensors besides the plain operators that it runs.
        dtensor_each_seconds: additional time for each of its DTensors (optimizers pass lists of them).
        sources: the source of each number.
    """

    name: str
    device: Literal["cpu", "cuda"]
    transport: Transport
    flops: dict[str, float]
    memory_bandwidth: float
    memory: int
    ranks_per_host: int
    inside: Link
    between: Link | None
    efficiency: Efficiency
    operator_seconds: float
    storage_bandwidth: float
    process_bytes: int
    host_memory: int = 2**40
    host_bandwidth: float = 3e11
    host_link: float = 2.5e10
    storage: int = 2**43
    collective_seconds: float = 0.0
    expandable_segments: bool = False
    dtensor_seconds: float = 40e-6
    dtensor_each_seconds: float = 4e-6
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not self.flops or any(not 0 < one < math.inf for one in self.flops.values()):
            raise ValueError(f'"flops" is {self.flops}; expected positive FLOP/s by dtype, such as "bfloat16": 9.9e14')

    def flops_for(self, dtype: torch.dtype) -> float:
        """The peak of matrix products of `dtype`, in operations per second.

        Raises:
            MachineError: if the description has no number for it.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in self.flops:
            raise MachineError(
                f"machine '{self.name}' says nothing of FLOP/s in {name}, which the model computes in; it has "
                f'{", ".join(self.flops)}. Add "{name}" to "flops" of its description'
            )
        return self.flops[name]

    def link(self, hosts: int) -> Link:
        """The slowest link between ranks on this many hosts.

        Raises:
            MachineError: for several hosts, if the description has only one.
        """
        if hosts == 1:
            return self.inside
        if self.between is None:
            raise MachineError(
                f"{hosts} hosts are needed, but machine '{self.name}' has no link between hosts; add \"between\" with "
                f'"bandwidth" and "latency" to its description, or use at most {self.ranks_per_host} ranks'
            )
        return self.between

    def replace(self, **changes: Any) -> Machine:
        """A copy with some attributes changed. Raises ValueError for invalid numbers."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The description as `load_machine` reads it."""
        return dataclasses.asdict(self)


def load_machine(path: Path) -> Machine:
    """Reads a description, as `Machine.to_json` writes it.

    Raises:
        MachineError: if the file is not a description; names the first missing or wrong entry.
    """
    try:
        return read_json(path, Machine, "a description of a machine", MachineError)
    except MachineError as error:
        raise MachineError(f"{error}; start from a complete one: shardkit estimate --show-machine h100") from error


@cache
def presets() -> dict[str, Machine]:
    """The GPUs that `preset` knows, by name."""
    import msgspec  # not needed to measure a machine

    text = files("shardkit.tools").joinpath("machines.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Machine])


def preset(name: str) -> Machine:
    """The description of a common GPU, eight to a host.

    Raises:
        MachineError: for an unknown name; lists the known ones.
    """
    if name.lower() not in presets():
        raise MachineError(
            f"there is no preset '{name}'; choose one of {', '.join(presets())}, 'this' (measured), and files (x.json)"
        )
    return presets()[name.lower()]


def threads_of_each(ranks: int) -> int:
    """Threads for each of `ranks` ranks that share the cores of this host."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
