"""What a module holds on this rank, in a form that ranks can tell each other before they move any tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.region import Region, region_of
from shardkit.core.torch_compat import local_of

EXPECTED_ERRORS = (ImportError, FileNotFoundError, PermissionError, OSError, TypeError, ValueError)


@dataclass(frozen=True)
class Failure:
    """An error that every rank is going to raise."""

    kind: type[Exception]
    text: str

    @classmethod
    def from_exception(cls, error: Exception, where: str) -> Failure:
        """Keeps the type of an error that users may want to catch; anything else becomes a RuntimeError."""
        kind = next((kind for kind in EXPECTED_ERRORS if isinstance(error, kind)), None)
        if kind is None:
            return cls(RuntimeError, f"{where}: {type(error).__name__}: {error}")
        return cls(kind, f"{where}: {error}")

    def exception(self) -> Exception:
        """The exception to raise."""
        return self.kind(self.text)


@dataclass(frozen=True)
class Slot:
    """One tensor of a module's state, as this rank holds it."""

    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    region: Region
    device_type: str  # where the shards live: that of the mesh, also for shards offloaded to CPU
    meta: bool


@dataclass(frozen=True)
class Report:
    """What a rank tells rank 0."""

    slots: dict[str, Slot] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    fingerprint: str | None = None
    failure: Failure | None = None
    unreadable: Failure | None = None  # why this rank cannot read the source; matters on rank 0 only


@dataclass(frozen=True)
class ModuleState:
    """The tensors of a module's `state_dict()`, themselves rather than detached, and its extra state."""

    tensors: dict[str, torch.Tensor]
    objects: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """Reads `state_dict()`, so that names and hooks are those which users know from there."""
        tensors: dict[str, torch.Tensor] = {}
        objects: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != "_extra_state":
                tensors[name] = value
            else:
                objects[name] = value
        return cls(tensors, objects)

    def report(self, fingerprint: str | None) -> Report:
        """The description of this rank's tensors. Raises as `region_of`, and RuntimeError for an unknown layout."""
        slots = {name: _slot_of(name, tensor) for name, tensor in self.tensors.items()}
        names_of: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            names_of.setdefault(id(tensor), []).append(name)
        ties = tuple(tuple(names) for names in names_of.values() if len(names) > 1)
        return Report(slots, tuple(self.objects), ties, fingerprint)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of a tensor, without autograd."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def disagreement(reports: list[Report]) -> Failure | None:
    """The first reason why ranks cannot go on together: one that failed, or one with other tensors than rank 0."""
    for rank, report in enumerate(reports):
        if report.failure is not None:
            return Failure(report.failure.kind, f"rank {rank}: {report.failure.text}")
    first = _described(reports[0])
    for rank, report in enumerate(reports):
        mine = _described(report)
        different = [name for name in first | mine if mine.get(name) != first.get(name)]
        if different:
            lines = [
                f"  {name}: rank 0 has {first.get(name, 'no such tensor')}, rank {rank} {mine.get(name, 'none')}"
                for name in different
            ]
            return Failure(
                RuntimeError,
                "the module differs between ranks, expected the same names, full shapes and dtypes everywhere:\n"
                + "\n".join(lines)
                + "\nbuild it the same way on all ranks, or pass group= with the ranks that share this module",
            )
    return None


def _described(report: Report) -> dict[str, str]:
    return {name: f"{slot.shape} {slot.dtype}" for name, slot in report.slots.items()}


def _slot_of(name: str, tensor: torch.Tensor) -> Slot:
    region = region_of(name, tensor)
    local = local_part(tensor)
    if local.numel() != region.numel or (local.numel() and tuple(local.shape) != region.shape):
        raise RuntimeError(
            f"{name}: this rank holds a piece of shape {tuple(local.shape)}, expected {region.shape} for placements "
            f"{getattr(tensor, 'placements', ())} of shape {tuple(tensor.shape)}"
        )
    device_type = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device.type
    return Slot(tuple(tensor.shape), tensor.dtype, region, device_type, local.is_meta)
