"""What a cluster can do: arithmetic, memory, links. Read from JSON, taken from a preset, or measured (`calibration`).

Presets are in `machines.json`, each number with its source. Peak numbers are those of data sheets; what part of them
programs reach is in `efficiency`.
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

import msgspec
import torch

from shardkit.tools.files import InputError, read_json

Transport: TypeAlias = Literal["nccl", "shared", "pairwise"]
"""How core moves bytes there: NCCL in place, gloo through shared memory, gloo between pairs of ranks."""


class MachineError(InputError):
    """A description that is wrong, or does not say what is asked of it."""


# What costs nothing, where it costs anything.
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
    """What one rank gets from one level of the network.

    Attributes:
        bandwidth: bytes per second that a rank sends, while it receives as much.
        latency: seconds of one step of a ring.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True)
class Efficiency:
    """What part of the peak numbers each class of operators reaches, from 0 to 1.

    Attributes:
        matmul: matrix products and convolutions, of `flops`.
        attention: fused attention, of `flops`.
        memory: everything else, of `memory_bandwidth`.
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
    """A cluster of equal hosts.

    Attributes:
        name: how reports call it.
        device: "cuda" for devices that work through a queue behind the host, "cpu" for ranks that compute themselves.
        transport: how core moves bytes.
        flops: dense matrix products, floating-point operations per second of one device, by dtype ("bfloat16").
        memory_bandwidth: bytes per second that one device reads and writes.
        memory: bytes of one device.
        ranks_per_host: devices of one host.
        inside: the link between ranks of one host.
        between: the link between ranks of different hosts; None if there is only one host.
        efficiency: the part of `flops` and of `memory_bandwidth` that programs reach.
        operator_seconds: host time of one operator; its launch, on a device with a queue.
        storage_bandwidth: bytes per second that one rank writes to and reads from files.
        expandable_segments: whether ranks set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
        process_bytes: memory of a rank that no tensor accounts for: context, libraries, communication.
        collective_seconds: what a collective takes beside its steps.
        dtensor_seconds: host time that an operator on DTensors takes beside the plain ones that it runs.
        dtensor_each_seconds: and for each DTensor that it is given (optimizers give lists of them).
        sources: for each number, where it comes from.
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
            MachineError: if the description does not say.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in self.flops:
            raise MachineError(
                f"machine '{self.name}' says nothing of FLOP/s in {name}, which the model computes in; it has "
                f'{", ".join(self.flops)}. Add "{name}" to "flops" of its description'
            )
        return self.flops[name]

    def link(self, hosts: int) -> Link:
        """The slowest link between ranks on so many hosts.

        Raises:
            MachineError: for several hosts, if the description knows one.
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
        """The same machine with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """What `load_machine` reads."""
        return dataclasses.asdict(self)


def load_machine(path: Path) -> Machine:
    """Reads a description, as `Machine.to_json` gives it.

    Raises:
        MachineError: for a file that is no description, with the first thing in it that is missing or wrong.
    """
    try:
        return read_json(path, Machine, "a description of a machine", MachineError)
    except MachineError as error:
        raise MachineError(f"{error}; a complete one to start from: shardkit estimate --show-machine h100") from error


@cache
def presets() -> dict[str, Machine]:
    """The GPUs that `preset` knows, by name."""
    text = files("shardkit.tools").joinpath("machines.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Machine])


def preset(name: str) -> Machine:
    """The description of a common GPU, eight to a host.

    Raises:
        MachineError: for a name that is none, with those that are.
    """
    if name not in presets():
        raise MachineError(
            f"there is no preset '{name}'; there are {', '.join(presets())}, 'this' (measured), and files (x.json)"
        )
    return presets()[name]


def threads_of_each(ranks: int) -> int:
    """Threads that each of so many ranks of this host computes with, if they share its cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
