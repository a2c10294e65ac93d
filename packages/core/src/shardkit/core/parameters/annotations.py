"""Plain parameters that `spmd_types` annotates: for each mesh axis, how the tensors of the ranks are related.

torchtitan annotates its models so by default. On data-parallel axes all ranks have the same values, and gradients are
summed (`R`). On any other axis, values and gradients are the same (`I`), or gradients have to be summed (`R`), or the
tensors are parts of one (`S`). For the last two a DTensor adapter is needed, and the whole mesh, with the names of its
data-parallel axes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.mesh import DataParallelMesh

__all__ = ["annotations_of", "check_annotations"]


def annotations_of(parameter: torch.Tensor) -> dict[Any, Any]:
    """The annotations of a plain parameter by mesh axis; empty without `spmd_types`."""
    spmd: Any = sys.modules.get("spmd_types")
    return {} if spmd is None or isinstance(parameter, DTensor) else spmd.get_local_type(parameter)


def check_annotations(annotated: dict[Any, Any], fqn: str, mesh: DataParallelMesh) -> None:
    """Raises unless the local tensor of a parameter with these annotations may be treated as the whole parameter.

    Raises:
        NotImplementedError: with FQN, axis and annotation.
    """
    spmd: Any = sys.modules["spmd_types"]
    axes = [spmd.MeshAxis.of(group) for group in mesh.groups]
    for axis, kind in annotated.items():
        several = len(axes) > 1 and axis.size() == mesh.size and all(one <= axis for one in axes)
        expected = spmd.R if several or any(axis <= one for one in axes) else spmd.I
        if axis.size() > 1 and kind is not expected:
            raise NotImplementedError(
                f"spmd_types annotates parameter '{fqn}' with {kind} on the mesh axis {axis}; expected {expected}, "
                "because the local tensor is taken for the whole parameter. Pass the whole mesh to fully_shard, name "
                "its data-parallel axes with dp_mesh_dims, and install shardkit-tp-adapter"
            )
