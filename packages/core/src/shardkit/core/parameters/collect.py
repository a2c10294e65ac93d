"""Which modules, parameters, ties and buffers one `fully_shard` call manages; all validation of user input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardkit.core.mesh import DataParallelMesh
from shardkit.core.parameters.adapters import Holder, form_of
from shardkit.core.parameters.ownership import owners_for
from shardkit.core.parameters.param import FSDPParam, ParameterForm, Slot, sharded_counterpart
from shardkit.core.parameters.placed import PlacedTensor
from shardkit.core.parameters.placements import Blocks, Owned, is_ours
from shardkit.core.parameters.subclass_gather import SubclassGather
from shardkit.core.policies import as_mesh_dims
from shardkit.core.torch_compat import RUNS_SUBCLASSES, is_plain, is_replicated, local_of, stock_engine_of

STATE = "_shardkit_state"
"""Attribute of a module that `fully_shard` was called on: its FSDPState."""

PlacementFn = Callable[[nn.Parameter], Any]
"""Chooses a placement, None, or an object with a placement and its own mesh."""

_IGNORED = "_shardkit_ignored"  # set on a module: names of its parameters that a call was told to ignore


@dataclass
class ManagedParameter:
    """One parameter that a call manages; several holders are a tie. `place` sets the last three.

    `plain` is the tensor to cut: the parameter, or the local tensor of a DTensor. A placement of None replicates it.
    """

    parameter: nn.Parameter
    fqn: str
    plain: torch.Tensor
    holders: list[Holder] = field(default_factory=list)
    placement: Placement | None = None
    mesh: DataParallelMesh = field(init=False)
    form: ParameterForm = field(init=False)


@dataclass
class Managed:
    """Modules that are not sharded by an earlier call, not replicated, and not below such; what they hold, each once.

    `ties` are parameters that an earlier call has sharded and that these modules hold too, with their slots here.
    """

    modules: list[nn.Module] = field(default_factory=list)
    parameters: list[ManagedParameter] = field(default_factory=list)
    ties: list[tuple[FSDPParam, list[Slot]]] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)


def modules_of_argument(module: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Validates the module or modules to shard; drops modules inside others of the list."""
    given = tuple(module) if isinstance(module, list | tuple) else (module,)
    if not given:
        raise ValueError("fully_shard got an empty list of modules; pass at least one")
    for one in given:
        if not isinstance(one, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, got {type(one).__name__}")
        if isinstance(one, nn.ModuleList | nn.ModuleDict) and type(one).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard cannot shard a {type(one).__name__}: it has no forward to gather parameters for. Call it "
                "on each of its modules, or pass them as a list to make them one group"
            )
        if STATE in one.__dict__:
            raise ValueError(
                f"fully_shard was already called on this {type(one).__name__}; a module is sharded once. "
                "To change its settings use the set_* methods of FSDPModule"
            )
        if is_replicated(one):
            raise ValueError(
                f"torch's replicate() was called on this {type(one).__name__}; fully_shard leaves such modules alone. "
                "Call it on the module that contains this one, or leave replicate() out"
            )
    inner = {id(below) for one in given for below in one.modules() if below is not one}
    return tuple(one for one in dict.fromkeys(given) if id(one) not in inner)


def manage(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> Managed:
    managed = Managed()
    by_id: dict[int, ManagedParameter] = {}
    ties: dict[int, list[Slot]] = {}
    seen_buffers: set[int] = set()
    for name, module in _walk(roots):
        if (engine := stock_engine_of(module)) is not None:  # each would wait for gathers that the other never starts
            where = f"module '{name}'" if name else f"this {type(module).__name__}"
            raise ValueError(
                f"torch's own {engine} has sharded {where}; one model has one engine. Call shardkit.core.install() "
                "before the first module is sharded, or shard every module with shardkit.core.fully_shard"
            )
        managed.modules.append(module)
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter in ignored:
                module.__dict__[_IGNORED] = module.__dict__.get(_IGNORED, frozenset()) | {attribute}
            if parameter is None or parameter in ignored:
                continue
            fqn = f"{name}.{attribute}" if name else attribute
            elsewhere = sharded_counterpart(parameter)
            if elsewhere is not None:
                if id(elsewhere) not in ties:
                    managed.ties.append((elsewhere, ties.setdefault(id(elsewhere), [])))
                ties[id(elsewhere)].append(Slot.of(module, attribute))
                continue
            if id(parameter) not in by_id:
                plain = parameter.detach()
                plain = local_of(plain) if isinstance(plain, DTensor) else plain
                by_id[id(parameter)] = ManagedParameter(parameter, fqn, plain)
                managed.parameters.append(by_id[id(parameter)])
            by_id[id(parameter)].holders.append((module, attribute))
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in seen_buffers:
                seen_buffers.add(id(buffer))
                managed.buffers.append(buffer)
    return managed


def added_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable plain parameters below a sharded module that no call has managed or was told to ignore, with FQNs."""
    below_replicated = {id(below) for module in root.modules() if is_replicated(module) for below in module.modules()}
    for name, module in root.named_modules():
        if id(module) in below_replicated:
            continue
        for attribute, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor) or not parameter.requires_grad:
                continue
            if attribute not in module.__dict__.get(_IGNORED, ()) and sharded_counterpart(parameter) is None:
                yield f"{name}.{attribute}" if name else attribute, parameter


def _walk(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a call with their names, each once, in the order of `named_modules`."""
    seen: set[int] = set()
    following = [("" if len(roots) == 1 else f"[{index}]", root) for index, root in enumerate(roots)][::-1]
    while following:
        name, module = following.pop()
        if id(module) in seen or STATE in module.__dict__ or is_replicated(module):
            continue
        seen.add(id(module))
        yield name, module
        prefix = f"{name}." if name else ""
        following += [(prefix + child_name, child) for child_name, child in module.named_children()][::-1]


def place(
    parameters: Sequence[ManagedParameter], choose: PlacementFn | None, default: DataParallelMesh
) -> dict[DataParallelMesh, list[ManagedParameter]]:
    """Gives parameters the placements that `shard_placement_fn` chooses, `Owned()` with ranks; returns them by mesh."""
    by_mesh: dict[DataParallelMesh, list[ManagedParameter]] = {}
    for one in parameters:
        chosen = None if choose is None else choose(one.parameter)
        mesh = _mesh_of(one, chosen, default)
        one.placement = _placement_of(one, chosen)
        by_mesh.setdefault(mesh, []).append(one)
    for mesh, ones in by_mesh.items():
        owned = [(one, one.placement) for one in ones if isinstance(one.placement, Owned)]
        open_ones = [(one, getattr(at, "plan", None)) for one, at in owned if at.rank is None]
        owners = owners_for([(one.parameter, plan) for one, plan in open_ones], mesh) if open_ones else []
        for (one, _), rank in zip(open_ones, owners, strict=True):
            one.placement = Owned(rank)
        for one, at in owned:
            if at.rank is not None and at.rank >= mesh.shard_size:
                raise ValueError(
                    f"shard_placement_fn returned {at} for parameter '{one.fqn}', but the shard group has "
                    f"{mesh.shard_size} ranks; expected a rank of the group, in [0, {mesh.shard_size - 1}]"
                )
        for one in ones:
            one.mesh, form = mesh if one.placement is not None else mesh.fully_replicated, None
            if isinstance(one.parameter, DTensor) or "spmd_types" in sys.modules:
                form = form_of(one.parameter, one.fqn, one.mesh, one.placement, one.holders)
            if form is None:
                kind = PlacedTensor if is_ours(one.placement) else DTensor
                placements = one.mesh.placements(one.placement)
                form = ParameterForm(one.parameter.shape, one.mesh.mesh, placements, kind)
            one.form = form
    return by_mesh


def _placement_of(managed: ManagedParameter, chosen: object | None) -> Placement | None:
    """The placement of a parameter from the result of `shard_placement_fn`; None: replicated, as any 0-dim one."""
    shape, plain = tuple(managed.parameter.shape), managed.plain
    if not is_plain(plain):
        SubclassGather.check(plain, managed.fqn)
    if hasattr(chosen, "mesh_info") and hasattr(chosen, "placement"):
        chosen = chosen.placement
    if not shape or isinstance(chosen, Replicate):
        return None
    if chosen is None:
        return Shard(0)
    numels: Sequence[int] = getattr(chosen, "block_numels", ())
    if len(numels) == 1:  # torch's BlockShard, which 2.15 has not: blocks of equal size
        chosen = Blocks(elements=numels[0])
    if isinstance(chosen, Owned | Blocks):
        if not is_plain(plain):
            raise TypeError(
                f"shard_placement_fn returned {chosen} for parameter '{managed.fqn}', which is a "
                f"{type(plain).__name__}: such tensors are cut by their own operators. Return Shard(dim) for it"
            )
        if not RUNS_SUBCLASSES:
            raise ValueError(
                f"shard_placement_fn returned {chosen} for parameter '{managed.fqn}', which needs torch 2.12 or later: "
                f"torch {torch.__version__} never runs the operators of a subclass of DTensor. Return Shard(dim) for "
                "it, or install a later torch"
            )
        return chosen
    if not isinstance(chosen, Shard):
        raise TypeError(
            f"shard_placement_fn returned {chosen!r} for parameter '{managed.fqn}'; expected Shard(dim), Replicate(), "
            "Owned(), Blocks(rows=...), Blocks(elements=...) or None"
        )
    dim = chosen.dim + len(shape) if chosen.dim < 0 else chosen.dim
    if not 0 <= dim < len(shape):
        raise ValueError(
            f"shard_placement_fn returned {chosen} for parameter '{managed.fqn}' of shape {shape}; "
            f"expected a dim between {-len(shape)} and {len(shape) - 1}"
        )
    return Shard(dim)


def _mesh_of(managed: ManagedParameter, chosen: object | None, default: DataParallelMesh) -> DataParallelMesh:
    """The mesh of one parameter from the result of `shard_placement_fn`: its own, or the call's.

    A result with a mesh has attributes `placement` and `mesh_info`, like stock's `ShardPlacementResult`; the latter has
    `mesh`, `shard_mesh_dim` and `replicate_mesh_dim`, like stock's `FSDPMeshInfo`.
    """
    info = getattr(chosen, "mesh_info", None)
    if info is None:
        return default
    mesh, shard = getattr(info, "mesh", None), getattr(info, "shard_mesh_dim", None)
    replicated = isinstance(getattr(chosen, "placement", None), Replicate)
    if not isinstance(mesh, DeviceMesh) or not (isinstance(shard, int) or replicated):
        raise TypeError(
            f"shard_placement_fn returned mesh_info={info!r} for parameter '{managed.fqn}'; expected one with a "
            "DeviceMesh as mesh and the index of its axis to shard over as shard_mesh_dim, such as FSDPMeshInfo"
        )
    replicate = getattr(info, "replicate_mesh_dim", None)
    axes = () if replicate is None else (replicate,)
    if mesh == default.mesh and (shard, axes) == (default.shard_axis, default.replicate_axes):
        return default
    dims = as_mesh_dims(getattr(info, "dp_mesh_dims", None))
    named = frozenset() if dims is None else frozenset(dims.shard_names + dims.replicate_names)
    return DataParallelMesh(mesh, shard, axes, named, getattr(info, "spmd_mesh", None) if named else None)
