"""`full_state_dict`: a sharded module's state as plain full tensors, gathered one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.core.checkpoint.peers import Peers
from shardkit.core.checkpoint.survey import Failure, ModuleState, Report, Slot, disagreement, local_part
from shardkit.core.region import Region

__all__ = ["full_state_dict"]


def full_state_dict(
    module: nn.Module,
    *,
    rank0_only: bool = True,
    offload: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The state dict of a sharded module with full plain tensors: parameters, persistent buffers, extra state.

    Collective over `group`. Gathers tensor by tensor to rank 0. With `rank0_only`, other ranks send their pieces,
    never hold a full tensor and get an empty dict; without, rank 0 sends each tensor on. Of a replicated tensor or a
    plain one (a buffer), rank 0's copy is taken.

    Args:
        module: any module; its parameters are DTensors on any meshes (Shard, strided Shard, Replicate) or plain.
        rank0_only: whether rank 0 alone gets the result.
        offload: put the result on CPU, each tensor as soon as it is complete; otherwise it stays on the device of the
            parameter.
        group: the ranks that share the module, by default all; "rank 0" is its first.

    Returns:
        Name -> tensor as in `module.state_dict()`, in its order. No tensor shares memory with the module; tied
        parameters share theirs with each other.

    Raises:
        RuntimeError: on all ranks, if tensors are on the meta device, or modules differ between ranks, or the ranks of
            `group` together do not hold a tensor whole.
        ValueError: a placement that is neither Replicate nor sharding.
    """
    peers = Peers.of(group)
    state, report = _survey(module)
    reports = peers.gather(report)
    plan = peers.from_rank0(None if reports is None else _plan(reports))
    if plan.failure is not None:
        raise plan.failure.exception()
    if state is None:
        raise AssertionError("a rank that failed to look at its module has failed the others too")
    receives = peers.rank == 0 or not rank0_only
    done: dict[int, torch.Tensor | None] = {}  # None on a rank that only sends
    result: dict[str, Any] = {}
    for name, owners in plan.owners.items():
        tensor, slot = state.tensors[name], report.slots[name]
        if id(tensor) not in done:
            full = _gather(name, local_part(tensor), slot, owners, peers, reports, everywhere=not rank0_only)
            done[id(tensor)] = None if full is None else full.to("cpu" if offload else local_part(tensor).device)
        if receives:
            result[name] = done[id(tensor)]
    if receives:
        result.update(state.objects)
    return result


@dataclass(frozen=True)
class _Plan:
    """For each tensor, in order, the ranks whose pieces make it up."""

    failure: Failure | None = None
    owners: dict[str, tuple[int, ...]] = field(default_factory=dict)


def _survey(module: nn.Module) -> tuple[ModuleState | None, Report]:
    try:
        state = ModuleState.of(module)
        return state, state.report(None)
    except Exception as error:  # noqa: BLE001 (raised by all ranks together, after they have told each other)
        failure = Failure.from_exception(error, f"cannot read the state of {type(module).__name__}")
        return None, Report(failure=failure)


def _plan(reports: list[Report]) -> _Plan:
    failure = disagreement(reports)
    if failure is not None:
        return _Plan(failure)
    unmade = [name for name in reports[0].slots if any(report.slots[name].meta for report in reports)]
    if unmade:
        text = f"tensors on the meta device have no values: {', '.join(unmade)}; call materialize or load them first"
        return _Plan(Failure(RuntimeError, text))
    owners: dict[str, tuple[int, ...]] = {}
    for name, slot in reports[0].slots.items():
        first_with: dict[Region, int] = {}
        for rank, report in enumerate(reports):
            if report.slots[name].region.numel:
                first_with.setdefault(report.slots[name].region, rank)
        held, needed = sum(region.numel for region in first_with), Region.whole(slot.shape).numel
        if held != needed:
            text = (
                f"{name}: the ranks of the group hold {held} elements, expected {needed}; "
                "pass group= with all ranks of the parameter's mesh"
            )
            return _Plan(Failure(RuntimeError, text))
        owners[name] = tuple(first_with.values())
    return _Plan(owners=owners)


def _gather(
    name: str,
    local: torch.Tensor,
    slot: Slot,
    owners: tuple[int, ...],
    peers: Peers,
    reports: list[Report] | None,
    *,
    everywhere: bool,
) -> torch.Tensor | None:
    """The full tensor, a copy, on rank 0 or everywhere. Collective."""
    if owners in ((), (0,)) and (peers.size == 1 or not everywhere):
        if peers.rank:
            return None
        return local.clone(memory_format=torch.contiguous_format).view(slot.shape)  # it may be cut between elements
    wire = peers.device_for(slot.device_type)
    full: torch.Tensor | None = None
    if peers.rank == 0 or everywhere:
        full = torch.empty(slot.shape, dtype=slot.dtype, device=wire)
    if reports is not None and full is not None:
        if 0 in owners:
            slot.region.put(full, local)
        _receive(full, {rank: reports[rank].slots[name].region for rank in owners if rank != 0}, peers)
    elif peers.rank in owners:
        peers.exchange(sends=[(0, local.to(wire).contiguous())])
    if everywhere and full is not None:
        peers.broadcast(full)
    return full


def _receive(full: torch.Tensor, pieces: dict[int, Region], peers: Peers) -> None:
    """Puts the pieces of other ranks into `full`: in place and all at once where they are contiguous in it."""
    windows = {rank: region.window(full) for rank, region in pieces.items()}
    peers.exchange(receives=[(rank, window) for rank, window in windows.items() if window is not None])
    for rank, window in windows.items():
        if window is None:
            # One after the other, so that no second copy of the full tensor builds up.
            piece = full.new_empty(pieces[rank].shape)
            peers.exchange(receives=[(rank, piece)])
            pieces[rank].put(full, piece)
