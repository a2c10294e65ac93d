"""Whether ranks that save a parameter under one name hold the same values. If not, they hold different modules.

A parameter that is no DTensor is written by one rank for all, so stages of a pipeline whose modules have the same names
would all come back as the first. A fingerprint hashes up to 1,024 elements, evenly spread: parameters of different
modules differ nearly everywhere, and a whole hash would cost more than the copy to staging memory. Buffers are left
out: running statistics may differ from rank to rank, and the first rank's are kept, as stock does.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of
from shardkit.core.checkpoint.memory import bytes_of
from shardkit.core.checkpoint.pieces import boxes_of

__all__ = ["Fingerprints", "check_same", "digest_of", "fingerprints"]

_SAMPLES = 1024


@dataclass(frozen=True)
class Box:
    """A part of a parameter; two ranks that hold the same one should hold the same values."""

    path: LeafPath
    look: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Fingerprints = dict[Box, int]


def fingerprints(values: Mapping[LeafPath, Any], parameters: Iterable[LeafPath], *, sharded: bool) -> Fingerprints:
    """Of the parameters among a rank's values: those that are no DTensors, or all. Not collective."""
    boxes: list[Box] = []
    samples: list[torch.Tensor] = []
    for path in parameters:
        value = values.get(path)
        if not isinstance(value, torch.Tensor) or (isinstance(value, DTensor) and not sharded):
            continue
        if value.layout is not torch.strided or value.device.type == "meta":
            continue  # refused by name when it is planned
        look = f"{value.dtype} {tuple(value.shape)}"
        for offsets, sizes, part in boxes_of(path, value):
            boxes.append(Box(path, look, offsets, sizes))
            flat = part.reshape(-1)
            # An odd stride does not stay in one column of a matrix.
            samples.append(bytes_of(flat[:: -(-flat.numel() // _SAMPLES) | 1].contiguous()))
    found: Fingerprints = {}
    for box, one in zip(boxes, _on_cpu(samples), strict=True):
        found[box] = _number(one.numpy().tobytes())
    return found


def _on_cpu(samples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One copy for all of a device, as each would wait for it."""
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


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 4


def digest_of(found: Fingerprints) -> int:
    """A number of 60 bits of them all."""
    return _number(repr(list(found.items())).encode())


def check_same(everyone: Sequence[Fingerprints]) -> None:
    """Raises CheckpointError if two ranks hold different values of one parameter, or different parameters by one name.

    Args:
        everyone: what each rank has found, by rank.
    """
    looks: dict[LeafPath, dict[str, list[int]]] = {}
    numbers: dict[Box, dict[int, list[int]]] = {}
    for rank, found in enumerate(everyone):
        for box, number in found.items():
            looks.setdefault(box.path, {}).setdefault(box.look, []).append(rank)
            numbers.setdefault(box, {}).setdefault(number, []).append(rank)
    what = "; modules that differ from rank to rank need names that differ, or go into per_rank="
    for path, by_look in looks.items():
        if len(by_look) > 1:
            told = ", ".join(f"ranks {_listed(ranks)} {look}" for look, ranks in by_look.items())
            raise CheckpointError(f"{name_of(path)}: ranks hold different parameters under this name: {told}{what}")
    for box, by_number in numbers.items():
        if len(by_number) > 1:
            first, *others = by_number.values()
            odd = sorted(rank for ranks in others for rank in ranks)
            raise CheckpointError(
                f"{name_of(box.path)}: ranks {_listed(odd)} hold other values than ranks "
                f"{_listed(first)} under this name, and a checkpoint would keep those of rank {first[0]}{what}"
            )


def _listed(ranks: Sequence[int]) -> str:
    unique = list(dict.fromkeys(ranks))
    return f"{unique[:8]}" if len(unique) <= 8 else f"{unique[:8]} and {len(unique) - 8} more"
