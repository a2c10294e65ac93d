"""Parameters that another parallelism has made DTensors, or that `spmd_types` annotates as parts of one.

Note [Forms]
Data parallelism cuts, gathers and reduces plain tensors. A `ParameterForm` (param.py) connects such a tensor to its
parameter. If another parallelism has made the parameter a DTensor, the tensor is this rank's local one, and a
distribution provides the form by an `Adapter` under the entry point group `shardkit.dtensor_adapters`.

Note [Annotations]
`spmd_types` says of a plain parameter, by mesh axis, how the ranks' tensors are related; torchtitan annotates its
models so by default. On data-parallel axes all ranks have the same values, and gradients are summed (`R`). On any other
axis, values and gradients are the same (`I`), or gradients have to be summed (`R`), or the tensors are parts of one
(`S`). For the last two a DTensor adapter is needed, and the whole mesh, with the names of its data-parallel axes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from shardkit.core.mesh import DataParallelMesh
from shardkit.core.parameters.param import ParameterForm
from shardkit.core.parameters.placed import PlacedTensor
from shardkit.core.parameters.placements import Blocks, is_ours, layout_for
from shardkit.core.torch_compat import local_of

ADAPTERS = "shardkit.dtensor_adapters"
"""The group of entry points under which distributions offer an `Adapter`."""

Holder = tuple[nn.Module, str]
"""A module, and the name of its attribute that is the parameter."""

Adapter: TypeAlias = Callable[[torch.Tensor, str, DataParallelMesh, int | None, Sequence[Holder]], ParameterForm]
"""Makes the form of a parameter with this FQN, cut on a tensor dim over a mesh; None (0-dim parameters): replicated.

A plain parameter is one that `spmd_types` annotates on axes of `mesh.whole`. Notes about a parameter are kept on its
holders, because the parameter is another tensor after `module.to()` or a load. It raises ValueError, TypeError or
NotImplementedError, with the FQN, for meshes, placements or annotations that do not match. Not collective.
"""


def form_of(
    parameter: torch.Tensor, fqn: str, mesh: DataParallelMesh, placement: Placement | None, holders: Sequence[Holder]
) -> ParameterForm | None:
    """The form of a parameter that is cut by `placement` over `mesh`; None where it is a whole plain tensor."""
    dim: int | None = getattr(placement, "dim", None)
    if not isinstance(parameter, DTensor):
        spmd: Any = sys.modules.get("spmd_types")
        if spmd is None or not (annotated := spmd.get_local_type(parameter)):
            return None
        model_axes = mesh.whole is not None and len(mesh.named) < mesh.whole.ndim
        if model_axes and not is_ours(placement) and (adapter := _dtensor_adapter()):
            return adapter(parameter, fqn, mesh, dim, holders)
        _check_annotations(annotated, fqn, mesh)
        return None
    adapter = _dtensor_adapter()
    if adapter is None:
        raise TypeError(
            f"parameter '{fqn}' is already a DTensor with placements {tuple(parameter.placements)} on "
            f"{parameter.device_mesh}; shardkit-core shards plain tensors. For tensor-parallel parameters install "
            "shardkit-tp-adapter; a parameter that fully_shard has sharded before cannot be sharded again"
        )
    if placement is not None and is_ours(placement):
        return _in_blocks(adapter, parameter, fqn, mesh, placement, holders)
    return adapter(parameter, fqn, mesh, dim, holders)


def _in_blocks(
    adapter: Adapter,
    parameter: DTensor,
    fqn: str,
    mesh: DataParallelMesh,
    placement: Placement,
    holders: Sequence[Holder],
) -> ParameterForm:
    """The form of a DTensor whose local tensor is cut in blocks: that of a replica, with the placement on one axis.

    Blocks must lie in the local tensor as in the whole, so each is one row, behind the dims that other axes cut.
    """
    layout, local = layout_for(placement, tuple(parameter.shape), 1), local_of(parameter)
    merged = parameter.ndim - len(layout.shape) + 1
    cut = {getattr(one, "dim", 0) for one in parameter.placements if not one.is_replicate()}
    if isinstance(placement, Blocks) and layout.unit == 1 and all(dim < merged for dim in cut):
        form = adapter(parameter, fqn, mesh.fully_replicated, None, holders)
        ranks = mesh.mesh.mesh.movedim(mesh.shard_axis or 0, -1).reshape(-1, mesh.shard_size)
        along = {tuple(row) for row in ranks.tolist()}
        for axis in range(form.mesh.ndim if form.local(local) is local else 0):
            rows = form.mesh.mesh.movedim(axis, -1).reshape(-1, form.mesh.size(axis))
            if along <= {tuple(row) for row in rows.tolist()} and form.placements[axis].is_replicate():
                placements = (*form.placements[:axis], placement, *form.placements[axis + 1 :])
                return replace(form, placements=placements, kind=PlacedTensor)
    raise NotImplementedError(
        f"parameter '{fqn}' of shape {tuple(parameter.shape)} is a DTensor with placements "
        f"{tuple(parameter.placements)} on {parameter.device_mesh}, so {placement} cannot cut it: only Blocks can "
        "whose blocks are one row each, behind the dims that these cut, of a weight that is not fused, on a mesh "
        "of one root. Use Shard(dim)"
    )


def _check_annotations(annotated: dict[Any, Any], fqn: str, mesh: DataParallelMesh) -> None:
    """Raises unless the local tensor of a parameter with these annotations may be treated as the whole parameter."""
    spmd: Any = sys.modules["spmd_types"]
    axes = [spmd.MeshAxis.of(group) for group in mesh.process_groups]
    for axis, kind in annotated.items():
        several = len(axes) > 1 and axis.size() == mesh.size and all(one <= axis for one in axes)
        expected = spmd.R if several or any(axis <= one for one in axes) else spmd.I
        if axis.size() > 1 and kind is not expected:
            raise NotImplementedError(
                f"spmd_types annotates parameter '{fqn}' with {kind} on the mesh axis {axis}; expected {expected}, "
                "because the local tensor is taken for the whole parameter. Pass the whole mesh to fully_shard, name "
                "its data-parallel axes with dp_mesh_dims, and install shardkit-tp-adapter"
            )


@functools.cache
def _dtensor_adapter() -> Adapter | None:
    """The adapter that an installed distribution provides, looked up at the first DTensor parameter."""
    found = list(entry_points(group=ADAPTERS))
    if len(found) > 1:
        names = ", ".join(sorted(f"{entry.name} = {entry.value}" for entry in found))
        raise RuntimeError(f"several adapters for DTensor parameters are installed ({names}); uninstall all but one")
    return cast(Adapter, found[0].load()) if found else None
