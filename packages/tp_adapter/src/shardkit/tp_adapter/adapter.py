"""How `fully_shard` shards a parameter that tensor or expert parallelism has already made a DTensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardkit.core.mesh import DataParallelMesh
from shardkit.core.parameters.adapters import Holder
from shardkit.core.parameters.param import ParameterForm
from shardkit.core.parameters.region import region_at
from shardkit.core.torch_compat import local_of, new_dtensor
from shardkit.tp_adapter.annotated import as_dtensor
from shardkit.tp_adapter.boxes import BoxedTensor, Boxes
from shardkit.tp_adapter.declared import declared_of, placements_in_whole
from shardkit.tp_adapter.joint_mesh import joint_mesh
from shardkit.tp_adapter.placing import order_of_cuts, region_held, torch_reads_truly
from shardkit.tp_adapter.torch_compat import KEEPS_READING, arrived_local_of

__all__ = ["AnnotatedForm", "TensorParallelForm", "adapter", "form_of"]


@dataclass(frozen=True, kw_only=True)
class TensorParallelForm(ParameterForm):
    """The form of one DTensor parameter.

    Attributes:
        fqn: name of the parameter, for messages.
        model_mesh, model_placements: those of the unsharded parameter, the DTensor that the user made.
        data_axes: the axes of `model_mesh` that are data-parallel (when the user's DTensor is on the full mesh).
        left_to_right: whether torch must be told that strided placements cut where they stand. Otherwise they mean, as
            in stock fully_shard, that later axes have cut first. It is set only where necessary, because torch then
            plans its first operators on such tensors slowly, for many seconds on meshes of three axes.
        boxes: this rank's boxes, if it holds several.
    """

    fqn: str
    model_mesh: DeviceMesh
    model_placements: tuple[Placement, ...]
    data_axes: frozenset[int]
    left_to_right: bool
    boxes: Boxes | None

    def sharded(self, shard: torch.Tensor) -> DTensor:
        """The DTensor on the joint mesh."""
        local = self.local(shard)
        return new_dtensor(local, self.mesh, self.placements, self.shape, self.left_to_right, self.kind)

    def local(self, shard: torch.Tensor, /) -> torch.Tensor:
        """The shard, with its boxes if it lies in several places."""
        if self.boxes is None or isinstance(shard, BoxedTensor):
            return shard
        return BoxedTensor.of(shard, self.boxes)

    def shard(self, local: torch.Tensor, /) -> torch.Tensor:
        """The shard without its boxes."""
        return local.plain() if isinstance(local, BoxedTensor) else local

    def unsharded(self, whole: torch.Tensor, /) -> torch.Tensor:
        """The user's DTensor over gathered memory."""
        return new_dtensor(self.shard(whole), self.model_mesh, self.model_placements, self.shape)

    def gradient(self, gradient: torch.Tensor, /) -> torch.Tensor:
        """The local gradient with the parameter's placements; a Partial gradient is summed over its axes.

        Nothing is summed over data-parallel axes; the reduction does that. Collective over model axes if placements
        differ, which they do on all ranks alike.

        Raises:
            TypeError: if the gradient is not a DTensor; the message has the FQN.
        """
        if not isinstance(gradient, DTensor):
            raise TypeError(
                f"parameter '{self.fqn}' is a DTensor with placements {self.model_placements}, but its gradient is a "
                f"plain {type(gradient).__name__}; let autograd compute it, or assign a DTensor"
            )
        wanted = tuple(
            seen if axis in self.data_axes and (seen.is_partial() or seen.is_replicate()) else own
            for axis, (seen, own) in enumerate(zip(gradient.placements, self.model_placements, strict=True))
        )
        if wanted != tuple(gradient.placements):
            gradient = gradient.redistribute(placements=wanted)
        return arrived_local_of(gradient)


@dataclass(frozen=True, kw_only=True)
class AnnotatedForm(TensorParallelForm):
    """The form of a plain parameter that `spmd_types` annotates: that of the DTensor that `as_dtensor` makes of it.

    `gradients` are the placements of a gradient, on the mesh of that DTensor.
    """

    gradients: tuple[Placement, ...]
    unsharded = ParameterForm.unsharded

    def gradient(self, gradient: torch.Tensor, /) -> torch.Tensor:
        """The gradient, summed over the axes of model parallelism that the parameter is annotated `R` on (collective).

        Data-parallel axes are left to the reduction.
        """
        return super().gradient(new_dtensor(gradient, self.model_mesh, self.gradients, self.shape))


def form_of(
    parameter: torch.Tensor, fqn: str, mesh: DataParallelMesh, dim: int | None, holders: Sequence[Holder] = ()
) -> TensorParallelForm:
    """The form of one parameter, cut on tensor dim `dim` over `mesh`; None (0-dim parameters): replicated.

    Raises:
        ValueError: for a Partial or unknown placement, a mesh of another root, overlapping axes, a local tensor
            that does not match its placements, placements that this torch would misread, or annotations that do not
            match the mesh; the message has the FQN and the placements.
        NotImplementedError: for an annotation that no placement stands for.
    """
    if not isinstance(parameter, DTensor):
        dtensor, gradients = as_dtensor(parameter, fqn, mesh)
        return AnnotatedForm(**vars(form_of(dtensor, fqn, mesh, dim, holders)), gradients=gradients)
    shape, cut = parameter.shape, 0 if dim is None else dim
    placements = tuple(parameter.placements)
    if (declared := declared_of(holders)) is not None:
        placements = placements_in_whole(parameter, declared.blocks, fqn)
    joint = joint_mesh(parameter, placements, fqn, mesh)
    order, in_order = order_of_cuts(shape, cut, joint.axes)
    _check_local(parameter, placements, fqn)
    region = region_held(fqn, shape, cut, joint.axes, joint.coordinate)
    several = region.numel > 0 and len(list(region.boxes())) > 1
    reread = placements != tuple(parameter.placements) or order != tuple(range(len(order)))
    sizes = [joint.axes[index].size for index in order]
    left_to_right = reread and not torch_reads_truly(shape, sizes, in_order)
    if left_to_right and not KEEPS_READING:
        raise ValueError(
            f"parameter '{fqn}' has placements {placements}, and its shards {in_order}, from left to right, which "
            f"needs torch 2.13 or later: torch {torch.__version__} forgets it in operators, such as detach() "
            "for a state dict. Use parallel styles without fused weights, or install a later torch"
        )
    replicated = (axis for axis, one in enumerate(parameter.placements) if one.is_replicate())
    return TensorParallelForm(
        shape,
        joint.ordered(order),
        in_order,
        sums_elsewhere=any(axis not in joint.data_axes for axis in replicated),
        fqn=fqn,
        model_mesh=parameter.device_mesh,
        model_placements=tuple(parameter.placements),
        data_axes=joint.data_axes,
        left_to_right=left_to_right,
        boxes=Boxes(shape, region) if several else None,
    )


def _check_local(parameter: DTensor, placements: Sequence[Placement], fqn: str) -> None:
    """Checks the local tensor: a DTensor accepts any, and further cuts would put a wrong one in wrong places."""
    mesh, local = parameter.device_mesh, local_of(parameter)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, fqn
    expected = region_at(fqn, parameter.shape, placements, mesh.mesh.shape, coordinate).shape
    if tuple(local.shape) != expected and (local.numel() or math.prod(expected)):
        raise ValueError(
            f"parameter '{fqn}' of shape {tuple(parameter.shape)} with placements {tuple(parameter.placements)} on "
            f"{mesh} has a local tensor of shape {tuple(local.shape)} on this rank, expected {expected}; make it with "
            "distribute_tensor"
        )


adapter = form_of
"""The entry point `tp` of the group `shardkit.dtensor_adapters`."""
