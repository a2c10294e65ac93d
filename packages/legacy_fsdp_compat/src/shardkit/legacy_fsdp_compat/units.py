"""The parameters of one FSDP module, under FSDP1's names and in the order of its flat parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard

from shardkit.core.engine.room import Group
from shardkit.core.parameters.param import FSDPParam, sharded_counterpart
from shardkit.core.parameters.region import region_of
from shardkit.core.runtime.collective import agree
from shardkit.core.torch_compat import like_dtensor, local_of, new_dtensor
from shardkit.legacy_fsdp_compat.flat_layout import FlatLayout, Interval, aligned_numel, row_intervals
from shardkit.legacy_fsdp_compat.meshes import Placement as Place
from shardkit.legacy_fsdp_compat.reshuffle import reshuffle
from shardkit.legacy_fsdp_compat.torch_compat import CHECKPOINT_PREFIX

__all__ = ["WRAPPED", "Unit", "UnitParameter", "clean_name"]

WRAPPED = "_fsdp_wrapped_module"
"""Attribute of an FSDP module that holds what it wraps; it stands in names as FSDP1 has it."""


def clean_name(name: str) -> str:
    """A name without the parts that wrappers add."""
    return name.replace(f"{WRAPPED}.", "").replace(CHECKPOINT_PREFIX, "")


@dataclass(frozen=True)
class UnitParameter:
    """One parameter of a unit.

    Attributes:
        name: name relative to the wrapped module, clean.
        aliases: all its names there, `name` first; tied parameters have several.
        param: core's object for it.
    """

    name: str
    aliases: tuple[str, ...]
    param: FSDPParam

    @property
    def sharded(self) -> nn.Parameter:
        """The sharded parameter, a DTensor, as optimizers hold it; includes one assigned since core last looked."""
        current = self.param.slots[0].get()
        return current if isinstance(current, DTensor) else self.param.sharded_param

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self.param.form.shape

    @property
    def is_model_parallel(self) -> bool:
        """Whether tensor parallelism has cut it first; the sharded parameter is then on a joint mesh."""
        return self.param.form.mesh is not self.param.mesh.mesh

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds it whole: NO_SHARD, and 0-dim parameters."""
        return self.param.mesh.shard_size == 1

    @cached_property
    def rows(self) -> tuple[Interval, ...]:
        """The elements of each rank of the shard group: of the parameter, or, if it is model-parallel, of this rank's
        local tensor.
        """
        return row_intervals(tuple(self.param.shape), self.param.mesh.shard_size)

    def like(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor over `local`, cut like the parameter: its optimizer state, or a new value."""
        if self.is_model_parallel:
            shard = self.param.form.local(local.view(self.param.local_shape))
            return like_dtensor(shard, cast(DTensor, self.param.sharded_param))
        return new_dtensor(local.view(self.param.local_shape), self.param.mesh.mesh, self._placements(), self.shape)

    def _placements(self) -> tuple[Placement, ...]:
        placement = Shard(0) if self.shape and not self.is_replicated else None
        return self.param.mesh.placements(placement)

    def own_rows(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a full tensor: a view if they are one box."""
        if self.is_model_parallel:
            return region_of(self.name, self.param.sharded_param).take(full)
        return self.rows_of_unsharded(full)

    def rows_of_unsharded(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the unsharded parameter in the form that modules hold: a view."""
        layout, full = self.param.layout, local_of(tensor) if isinstance(tensor, DTensor) else tensor
        if self.is_replicated:
            return full
        rank = self.param.mesh.shard_rank
        return full.narrow(0, layout.offset(rank), layout.length(rank))


class Unit:
    """The parameters of one FSDP module, and how FSDP1 would lay them out.

    Attributes:
        parameters: those that this unit was the first to wrap, with all their names below the wrapped module.
        tied: parameters of other units, with the names that modules of this unit have for them.

    Args:
        wrapped: the wrapped module, after sharding.
        placement: the process groups.
        use_orig_params: FSDP1's flag; it decides the layout of LOCAL state dicts.
        compute_dtype: `param_dtype` of mixed precision, which determines the alignment.
        belongs: whether a core parameter belongs to this unit, rather than being tied to one of another unit.
    """

    def __init__(
        self,
        wrapped: nn.Module,
        placement: Place,
        use_orig_params: bool,
        compute_dtype: torch.dtype | None,
        belongs: Callable[[FSDPParam], bool],
    ) -> None:
        self.placement = placement
        self.use_orig_params = use_orig_params
        self._compute_dtype = compute_dtype
        self.parameters = _find_parameters(wrapped, belongs)
        self.tied = _find_parameters(wrapped, lambda param: not belongs(param), own_names_only=True)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that shards."""
        return self.placement.group

    @cached_property
    def layout(self) -> FlatLayout:
        """FSDP1's flat layout.

        Raises:
            ValueError: for parameters of several dtypes, which no flat parameter can hold.
        """
        dtypes = {str(one.sharded.dtype): one.name for one in self.parameters}
        if len(dtypes) > 1:
            raise ValueError(
                f"LOCAL_STATE_DICT keeps one flat tensor per FSDP module, but this one has parameters of several "
                f"dtypes: {dtypes}. Wrap them separately, or use SHARDED_STATE_DICT"
            )
        dtype = self._compute_dtype or self.parameters[0].sharded.dtype
        alignment = aligned_numel(dtype.itemsize) if self.use_orig_params else 1
        shapes = tuple(tuple(one.shape) for one in self.parameters)
        return FlatLayout(shapes, self.group.size(), alignment)

    def full(self, parameter: UnitParameter, value: torch.Tensor, *, everywhere: bool = True) -> torch.Tensor | None:
        """All of `value`, a DTensor cut like `parameter`: a new plain tensor (collective over the shard group, and over
        the model-parallel axes of a parameter that has them).

        Without `everywhere`, only rank 0 of the group gets it, and other ranks get None.
        """
        whole = self.unsharded(parameter, value, everywhere=everywhere)
        return whole.full_tensor() if isinstance(whole, DTensor) else whole

    def unsharded(
        self, parameter: UnitParameter, value: torch.Tensor, *, everywhere: bool = True
    ) -> torch.Tensor | None:
        """`value`, a DTensor cut like `parameter`, in the form that modules compute with: a new plain tensor, or a
        DTensor on the model-parallel axes alone (collective over the shard group). `everywhere` as for `full`.
        """
        local = local_of(value).detach()
        mine = everywhere or self.group.rank() == 0
        if parameter.is_replicated:
            return parameter.param.form.unsharded(local.clone()) if mine else None
        numel = parameter.param.shape.numel()
        wanted = [(0, numel if everywhere or rank == 0 else 0) for rank in range(self.group.size())]
        flat = reshuffle(local.contiguous().view(-1), parameter.rows, wanted, self.group)
        return parameter.param.form.unsharded(flat.view(parameter.param.shape)) if mine else None


def label_alike(groups: Sequence[Group]) -> None:
    """Labels groups alike on all ranks, where a rank has names of its own (collective over their ranks).

    Labels identify joint operations of ranks: over shared memory they are compared.
    """
    names: dict[dist.ProcessGroup, list[str]] = {}
    for group in groups:
        if group.mesh.shard_group is not None:
            names.setdefault(group.mesh.shard_group, []).append(group.label)
    differ = {one for one, mine in names.items() if not agree(repr(mine).encode(), one, groups[0].device)}
    for number, group in enumerate(groups):
        if group.mesh.shard_group in differ:
            group.label = f"parameter group {number}"


def _find_parameters(
    wrapped: nn.Module, belongs: Callable[[FSDPParam], bool], *, own_names_only: bool = False
) -> tuple[UnitParameter, ...]:
    names: dict[FSDPParam, list[str]] = {}
    for prefix, module in wrapped.named_modules(remove_duplicate=False):
        if own_names_only and WRAPPED in prefix.split("."):
            continue
        for name, parameter in module._parameters.items():
            param = sharded_counterpart(parameter) if parameter is not None else None
            if param is not None and belongs(param):
                fqn = clean_name(f"{prefix}.{name}" if prefix else name)
                if fqn not in names.setdefault(param, []):
                    names[param].append(fqn)
    return tuple(UnitParameter(found[0], tuple(found), param) for param, found in names.items())
