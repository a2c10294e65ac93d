"""How `fully_shard` is applied to a model that comes unsharded: which modules, with which settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from shardkit.core import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from shardkit.tools.estimating.errors import EstimateError

__all__ = ["Policies", "apply_policies", "blocks_of"]


@dataclass(frozen=True)
class Policies:
    """How a model is sharded.

    Attributes:
        wrap: names of the modules that get a `fully_shard` call of their own: FQNs or class names. None: the model's
            repeated blocks. Empty: only the root.
        reshard_after_forward: as for `fully_shard`, for the wrapped modules.
        param_dtype: of computation, None for the parameters' own.
        reduce_dtype: of gradient reduction, None for the gradients' own.
        prefetch_depth: how many groups are gathered ahead.
        prefetch_budget: bytes that may be unsharded at a time, in place of a depth; None for a depth.
        checkpoint: whether the wrapped modules recompute their activations in backward.
        offload: whether shards, gradients and optimizer state live in host memory.
        accumulate: micro-batches of one iteration.
    """

    wrap: tuple[str, ...] | None = None
    reshard_after_forward: bool | int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    prefetch_depth: int = 1
    prefetch_budget: int | None = None
    checkpoint: bool = False
    offload: bool = False
    accumulate: int = 1


def blocks_of(model: nn.Module, wrap: Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    """The modules to shard by themselves, innermost first, with their FQNs.

    Raises:
        EstimateError: for a name that no module has.
    """
    modules = [(fqn, module) for fqn, module in model.named_modules() if fqn]
    if wrap is None:
        return _repeated(model, modules)
    chosen = []
    for name in wrap:
        matching = [(fqn, module) for fqn, module in modules if name in (fqn, type(module).__name__)]
        if not matching:
            classes = sorted({type(module).__name__ for _, module in modules})
            raise EstimateError(f"no module has the FQN or class name '{name}'; classes of the model are {classes}")
        chosen += matching
    return sorted(dict(chosen).items(), key=lambda one: -one[0].count("."))


def _repeated(model: nn.Module, modules: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The outermost modules of a class that occurs several times in one list, with parameters of their own."""
    found: list[tuple[str, nn.Module]] = []
    for fqn, module in [("", model), *modules]:
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        if any(fqn.startswith(f"{block}.") or fqn == block for block, _ in found):
            continue
        children = [
            (name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None
        ]
        counts = Counter(type(child) for _, child in children)
        prefix = f"{fqn}." if fqn else ""
        found += [(prefix + name, child) for name, child in children if counts[type(child)] > 1]
    return found


def apply_policies(model: nn.Module, policies: Policies, mesh: DeviceMesh) -> None:
    """Shards a model in place over all axes of `mesh`: its blocks, then itself.

    Raises:
        EstimateError: for names of modules that are none, and for axes that policies cannot use.
    """
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 2 or "tp" in names:
        raise EstimateError(
            f"the model comes unsharded, and policies know no mesh with the axes {names}; use one axis, or two for "
            'HSDP, and "tp" only with a plan for tensor parallelism; or a factory that takes the mesh and shards the '
            "model itself"
        )
    precision = MixedPrecisionPolicy(param_dtype=policies.param_dtype, reduce_dtype=policies.reduce_dtype)
    offload = CPUOffloadPolicy() if policies.offload else OffloadPolicy()
    for _, block in blocks_of(model, policies.wrap):
        if policies.checkpoint:
            _recompute(block)
        reshard = policies.reshard_after_forward
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    assert isinstance(model, FSDPModule)
    if policies.prefetch_budget is None:
        model.set_prefetch_depth(policies.prefetch_depth)
    else:
        model.set_prefetch_budget(policies.prefetch_budget)


def _recompute(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
