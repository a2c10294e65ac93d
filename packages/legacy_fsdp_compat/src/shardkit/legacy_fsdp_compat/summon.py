"""`summon_full_params`: whole parameters in place of the sharded ones, for the duration of a context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from shardkit.core.engine.step import FSDPState
from shardkit.core.torch_compat import in_backward, like_dtensor, local_of
from shardkit.legacy_fsdp_compat.units import Unit, UnitParameter

__all__ = ["SummonOptions", "refuse_while_running", "summoned"]


@dataclass(frozen=True)
class SummonOptions:
    """The arguments of `summon_full_params`, which it documents. Raises what stock raises for the same combinations."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def __post_init__(self) -> None:
        if self.writeback and self.rank0_only:
            raise NotImplementedError(
                "writeback=True and rank0_only=True: ranks without the full parameters cannot write back; pass "
                "writeback=False, or rank0_only=False"
            )


def refuse_while_running(state: FSDPState, action: str) -> None:
    """Raises AssertionError inside forward or backward, where parameters belong to the computation."""
    if state.in_forward or in_backward():
        raise AssertionError(f"{action} of '{state.fqn}' inside forward or backward; call it before or after")


@contextmanager
def summoned(units: Sequence[tuple[Unit, FSDPState]], options: SummonOptions) -> Iterator[None]:
    """Registers full parameters, in their original dtype, on the modules of `units` (collective: gathers each once).

    A failure on entry leaves the sharded parameters registered.

    Raises:
        ValueError: if the user has replaced a parameter by one that is not a shard of it; raised before anything is
            gathered.
    """
    shown: list[tuple[UnitParameter, nn.Parameter]] = []  # with the sharded parameter to restore
    finished = False
    try:
        for _, state in units:
            refuse_while_running(state, "summon_full_params")
            state.to_sharded()
            for group in state.groups:
                group.sweep()
        for unit, _ in units:
            for parameter in unit.parameters:
                sharded = parameter.sharded
                if _show(unit, parameter, options):
                    shown.append((parameter, sharded))
        yield
        finished = True
    finally:
        changed = [parameter.param.slots[0].get() for parameter, _ in shown]
        for parameter, sharded in shown:  # if anything below fails, the model is as before
            parameter.param.register(sharded)
        if options.writeback and finished:
            for (parameter, _), current in zip(shown, changed, strict=True):
                _write_back(parameter, current, options)


def _show(unit: Unit, parameter: UnitParameter, options: SummonOptions) -> bool:
    """Registers the whole parameter; returns whether this rank gets it."""
    everywhere = not options.rank0_only
    value = unit.unsharded(parameter, parameter.sharded, everywhere=everywhere)
    if options.with_grads:
        parameter.param.refuse_pending("summon_full_params(with_grads=True) reads gradients")
    gradient = parameter.sharded.grad if options.with_grads else None
    full_gradient = None if gradient is None else unit.unsharded(parameter, gradient, everywhere=everywhere)
    if value is None:
        return False
    if options.offload_to_cpu:
        value = value.cpu()
    full = nn.Parameter(value, requires_grad=parameter.sharded.requires_grad)
    if full_gradient is not None:
        full.grad = full_gradient.to(full.device)
    parameter.param.register(full)
    return True


@torch.no_grad()
def _write_back(parameter: UnitParameter, current: nn.Parameter | None, options: SummonOptions) -> None:
    if current is None:  # deleted by the user: the sharded one is restored unchanged
        return
    if current.shape != parameter.shape:
        raise RuntimeError(
            f"'{parameter.name}' has shape {tuple(current.shape)} at the end of summon_full_params, expected "
            f"{tuple(parameter.shape)}: its values cannot be written back to the shards; change values, not shapes"
        )
    sharded = parameter.sharded
    # A replicated parameter is both unsharded and sharded, and autograd may have saved it in forward. `.data` has a
    # separate version counter, so backward computes with the new values, as it does where it gathers again.
    local_of(sharded).data.copy_(parameter.rows_of_unsharded(current.detach()))
    sharded.requires_grad_(current.requires_grad)
    if options.with_grads:
        gradient = current.grad
        if gradient is None:
            sharded.grad = None
        elif sharded.grad is not None:
            local_of(sharded.grad).copy_(parameter.rows_of_unsharded(gradient))
        else:
            local = parameter.rows_of_unsharded(gradient).to(local_of(sharded).device).clone()
            sharded.grad = like_dtensor(local, sharded)
