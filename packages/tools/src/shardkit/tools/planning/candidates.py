"""What a plan chooses among."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import nn

from shardkit.tools.estimating.batches import with_micro_batch
from shardkit.tools.estimating.job import TrainingJob
from shardkit.tools.estimating.policies import Policies, blocks_of
from shardkit.tools.estimating.render import size
from shardkit.tools.machine import Machine

__all__ = ["Candidate", "candidates", "meshes", "tensor_parallel_meshes", "wrappings"]

Axes: TypeAlias = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh."""

# A module outside of the blocks gets a group of its own if it holds this part of all parameters.
_LARGE_PART = 0.05


@dataclass(frozen=True)
class Candidate:
    """One way to shard and run a model: mesh, policies, samples of a micro-batch."""

    axes: Axes
    policies: Policies
    micro_batch: int

    @property
    def samplers(self) -> int:
        """Ranks with samples of their own: those that "tp" joins share theirs."""
        return math.prod(size for name, size in self.axes if name != "tp")

    def job(self, job: TrainingJob) -> TrainingJob:
        """The job, run this way."""
        return with_micro_batch(replace(job, policies=self.policies), self.micro_batch)

    def describe(self) -> str:
        """The choices in a few words."""
        policies = self.policies
        mesh = " x ".join(f"{name} {length}" for name, length in self.axes)
        parts = [mesh, f"micro-batch {self.micro_batch}"]
        if policies.prefetch_budget is None:
            parts.append(f"prefetch {policies.prefetch_depth}")
            parts.append("keep" if policies.reshard_after_forward is False else "reshard")
        else:
            parts.append(f"prefetch within {size(policies.prefetch_budget)}")
        if policies.checkpoint:
            parts.append("recompute")
        if policies.wrap is not None:
            parts.append("outer modules apart")
        return ", ".join(parts)


def meshes(world_size: int, machine: Machine) -> list[Axes]:
    """Sharding over all ranks; and over one host, or a few, with replicas."""
    found: list[Axes] = [(("dp_shard", world_size),)]
    together = machine.ranks_per_host
    while together < world_size:
        if world_size % together == 0:
            found.append((("dp_replicate", world_size // together), ("dp_shard", together)))
        together *= 4
    return found


def tensor_parallel_meshes(world_size: int, machine: Machine) -> list[Axes]:
    """Two, four and eight ranks of a host that share the work on each sample, and sharding over the others."""
    together = [size for size in (2, 4, 8) if machine.ranks_per_host % size == 0 and world_size % size == 0]
    return [(("dp_shard", world_size // size), ("tp", size)) for size in together]


def wrappings(model: nn.Module, wrap: tuple[str, ...] | None) -> list[tuple[str, ...] | None]:
    """The model's blocks; and, beside them, each module outside of them that holds a large part of the parameters."""
    blocks = [fqn for fqn, _ in blocks_of(model, wrap)]
    inside = {fqn for fqn, _ in model.named_modules() if any(f"{fqn}.".startswith(f"{block}.") for block in blocks)}
    total = sum(parameter.numel() for parameter in model.parameters())
    owners: dict[int, list[str]] = {}
    for fqn, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(fqn)
    tied = {fqn for names in owners.values() if len(names) > 1 for fqn in names}
    outer = [
        fqn
        for fqn, module in model.named_modules()
        if fqn and fqn not in inside | tied
        and sum(one.numel() for one in module.parameters(recurse=False)) >= _LARGE_PART * total
    ]  # fmt: skip
    return [wrap, (*blocks, *outer)] if outer and blocks else [wrap]


def candidates(
    base: Policies, wraps: list[tuple[str, ...] | None], over: list[Axes], micro_batch: int
) -> list[Candidate]:
    """Every combination of mesh, wrapping, reshard policy and recomputation."""
    return [
        Candidate(axes, replace(base, wrap=wrap, reshard_after_forward=reshard, checkpoint=recompute), micro_batch)
        for axes in over
        for wrap in wraps
        for reshard in (True, False)
        for recompute in ((True,) if base.checkpoint else (False, True))
    ]


def with_setting(candidate: Candidate, **changes: object) -> Candidate:
    """The candidate with other policies."""
    settings: Mapping[str, object] = changes
    return replace(candidate, policies=replace(candidate.policies, **settings))  # type: ignore[arg-type]
