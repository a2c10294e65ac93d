"""What a cluster can do: arithmetic, memory, links. Read from JSON, taken from a preset, or measured (`calibration`).

A description says what a program gets, not what a data sheet promises: peak numbers are multiplied by `efficiency`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

__all__ = ["Link", "Machine", "MachineError", "Transport", "load_machine", "preset", "preset_names", "threads_of_each"]

Transport: TypeAlias = Literal["nccl", "shared", "pairwise"]
"""How core moves bytes there: NCCL in place, gloo through shared memory, gloo between pairs of ranks."""


class MachineError(ValueError):
    """A description that is wrong, or does not say what is asked of it."""


@dataclass(frozen=True)
class Link:
    """What one rank gets from one level of the network.

    Attributes:
        bandwidth: bytes per second that a rank sends, while it receives as much.
        latency: seconds that a collective takes beside moving its bytes.
    """

    bandwidth: float
    latency: float


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
        dtensor_seconds: host time that an operator on DTensors takes beside the plain ones that it runs.
        dtensor_each_seconds: and for each DTensor that it is given (optimizers give lists of them).
        storage_bandwidth: bytes per second that one rank writes to and reads from files.
        process_bytes: memory of a rank that no tensor accounts for: context, libraries, communication.
        sources: for each number, where it comes from.
    """

    name: str
    device: Literal["cpu", "cuda"]
    transport: Transport
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory: int
    ranks_per_host: int
    inside: Link
    between: Link | None
    efficiency: float
    operator_seconds: float
    storage_bandwidth: float
    process_bytes: int
    dtensor_seconds: float = 40e-6
    dtensor_each_seconds: float = 4e-6
    sources: Mapping[str, str] = field(default_factory=dict)

    def flops_for(self, dtype: torch.dtype) -> float:
        """Operations per second that matrix products of `dtype` reach.

        Raises:
            MachineError: if the description does not say.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in self.flops:
            raise MachineError(
                f"machine '{self.name}' says nothing of FLOP/s in {name}, which the model computes in; it has "
                f'{", ".join(self.flops) or "no dtype"}. Add "{name}" to "flops" of its description'
            )
        return self.flops[name] * self.efficiency

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


_NUMBERS = {
    "memory_bandwidth": float,
    "memory": int,
    "ranks_per_host": int,
    "efficiency": float,
    "operator_seconds": float,
    "storage_bandwidth": float,
    "process_bytes": int,
    "dtensor_seconds": float,
    "dtensor_each_seconds": float,
}
_MAY_BE_ZERO = ("operator_seconds", "process_bytes", "dtensor_seconds", "dtensor_each_seconds")
# What a description may leave out.
_OPTIONAL = ("dtensor_seconds", "dtensor_each_seconds", "sources")
_NAMES = {"device": ("cpu", "cuda"), "transport": get_args(Transport)}


def load_machine(path: Path) -> Machine:
    """Reads a description, as `Machine.to_json` gives it.

    Raises:
        MachineError: for a file that is no description or has holes, all of which are listed.
    """
    try:
        described = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MachineError(f"{path} cannot be read as a machine description: {error}") from error
    if not isinstance(described, dict):
        raise MachineError(
            f"{path}: expected an object with the attributes of a machine, got {type(described).__name__}"
        )
    return machine_of(described, str(path))


def machine_of(described: Mapping[str, Any], where: str) -> Machine:
    """A machine from its attributes; `where` they come from is for messages.

    Raises:
        MachineError: for holes and for numbers that are none.
    """
    problems = [*_holes(described), *_wrong_numbers(described), *_wrong_names(described)]
    known = {each.name for each in dataclasses.fields(Machine)}
    problems += [f'"{name}" is no attribute of a machine' for name in described if name not in known]
    if problems:
        raise MachineError(
            f"{where} does not describe a machine:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nwrite a complete one to start from with: shardkit estimate --show-machine h100"
        )
    between = described["between"]
    return Machine(
        **{
            **described,
            "inside": Link(**described["inside"]),
            "between": None if between is None else Link(**between),
        }
    )


def _holes(described: Mapping[str, Any]) -> list[str]:
    wanted = [each.name for each in dataclasses.fields(Machine) if each.name not in _OPTIONAL]
    return [f'"{name}" is missing' for name in wanted if name not in described]


def _wrong_numbers(described: Mapping[str, Any]) -> list[str]:
    problems = []
    numbers = {name: described[name] for name in _NUMBERS if name in described}
    flops = described.get("flops", {"": 1.0})
    if isinstance(flops, Mapping) and flops:
        numbers |= {f"flops.{dtype}": value for dtype, value in flops.items()}
    else:
        problems.append(f'"flops" is {flops!r}; expected FLOP/s by dtype, such as {{"bfloat16": 9.9e14}}')
    for level in ("inside", "between"):
        link = described.get(level)
        if link is None and (level == "between" or level not in described):
            continue
        if not isinstance(link, Mapping) or set(link) != {"bandwidth", "latency"}:
            problems.append(f'"{level}" is {link!r}; expected "bandwidth" (bytes/s) and "latency" (seconds)')
            continue
        numbers |= {f"{level}.{name}": value for name, value in link.items()}
    for name, value in numbers.items():
        may_be_zero = name.endswith("latency") or name in _MAY_BE_ZERO
        kind = "positive whole number" if _NUMBERS.get(name) is int else "positive number"
        if not _is_number(value, _NUMBERS.get(name, float)) or value < 0 or not (value or may_be_zero):
            problems.append(f'"{name}" is {value!r}; expected a {kind}')
        elif name == "efficiency" and value > 1:
            problems.append(f'"efficiency" is {value!r}; expected a part of the peak numbers, from 0 to 1')
    return problems


def _is_number(value: Any, kind: type) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole or (kind is float and isinstance(value, float) and math.isfinite(value))


def _wrong_names(described: Mapping[str, Any]) -> list[str]:
    return [
        f'"{name}" is {described[name]!r}; expected one of {", ".join(choices)}'
        for name, choices in _NAMES.items()
        if name in described and described[name] not in choices
    ] + [
        f'"{name}" is {described[name]!r}; expected {what}'
        for name, kind, what in (("name", str, "a text"), ("sources", dict, "texts by attribute"))
        if name in described and not isinstance(described[name], kind)
    ]


_GIB = 2**30
_SHEET = "vendor's data sheet, dense (without sparsity)"
_ASSUMED = "assumed; measure yours"


def _gpu(
    name: str,
    flops: dict[str, float],
    bandwidth: float,
    memory: int,
    inside: tuple[float, str],
    between: tuple[float, str],
) -> Machine:
    return Machine(
        name=name,
        device="cuda",
        transport="nccl",
        flops={dtype: tera * 1e12 for dtype, tera in flops.items()},
        memory_bandwidth=bandwidth,
        memory=memory * _GIB,
        ranks_per_host=8,
        inside=Link(inside[0], 20e-6),
        between=Link(between[0], 40e-6),
        efficiency=0.6,
        operator_seconds=8e-6,
        storage_bandwidth=1e9,
        process_bytes=2 * _GIB,
        sources={
            "flops": _SHEET,
            "memory_bandwidth": _SHEET,
            "memory": _SHEET,
            "inside.bandwidth": inside[1],
            "between.bandwidth": between[1],
            **dict.fromkeys(
                (
                    "inside.latency",
                    "between.latency",
                    "efficiency",
                    "operator_seconds",
                    "dtensor_seconds",
                    "dtensor_each_seconds",
                    "storage_bandwidth",
                    "process_bytes",
                ),
                _ASSUMED,
            ),
            "ranks_per_host": "the usual eight",
        },
    )


def _nvlink(gigabytes: float) -> tuple[float, str]:
    return gigabytes * 1e9, f"NVLink, half of the data sheet's {2 * gigabytes:g} GB/s, which counts both directions"


def _network(gigabits: float) -> tuple[float, str]:
    return gigabits / 8 * 1e9, f"one {gigabits:g} Gbit/s adapter for each GPU, as in the vendor's own systems"


# float32 products run as TF32 only if torch is told so; these are the CUDA cores' numbers, as torch does by default.
_PRESETS = {
    "v100": _gpu("V100 SXM2 32 GB", {"float16": 125, "float32": 15.7}, 900e9, 32, _nvlink(150), _network(100)),
    "a100": _gpu(
        "A100 SXM 80 GB", {"bfloat16": 312, "float16": 312, "float32": 19.5}, 2039e9, 80, _nvlink(300), _network(200)
    ),
    "a100-40gb": _gpu(
        "A100 SXM 40 GB", {"bfloat16": 312, "float16": 312, "float32": 19.5}, 1555e9, 40, _nvlink(300), _network(200)
    ),
    "l4": _gpu(
        "L4",
        {"bfloat16": 121, "float16": 121, "float32": 30.3},
        300e9,
        24,
        (32e9, "PCIe 4.0 x16, one direction"),
        _network(100),
    ),
    "h100": _gpu("H100 SXM", {"bfloat16": 989, "float16": 989, "float32": 67}, 3350e9, 80, _nvlink(450), _network(400)),
    "h200": _gpu(
        "H200 SXM", {"bfloat16": 989, "float16": 989, "float32": 67}, 4800e9, 141, _nvlink(450), _network(400)
    ),
    "b200": _gpu(
        "B200 SXM", {"bfloat16": 2250, "float16": 2250, "float32": 75}, 7700e9, 180, _nvlink(900), _network(400)
    ),
}


def threads_of_each(ranks: int) -> int:
    """Threads that each of so many ranks of this host computes with, if they share its cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def preset_names() -> tuple[str, ...]:
    """The GPUs that `preset` knows."""
    return tuple(_PRESETS)


def preset(name: str) -> Machine:
    """The description of a common GPU, eight to a host.

    Raises:
        MachineError: for a name that is none, with those that are.
    """
    if name not in _PRESETS:
        raise MachineError(
            f"there is no preset '{name}'; there are {', '.join(_PRESETS)}, 'this' (measured), and files (x.json)"
        )
    return _PRESETS[name]
