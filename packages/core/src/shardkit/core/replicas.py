"""`broadcast_replicas`: the same values on all ranks that hold a copy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.engine.root import buffers_of_ranks
from shardkit.core.engine.step import state_of
from shardkit.core.mesh import groups_of_copies
from shardkit.core.tensors import bytes_of
from shardkit.core.torch_compat import local_of


@torch.no_grad()
def broadcast_replicas(module: nn.Module) -> None:
    """Copies the first replica's values to the others, where ranks were seeded differently or have loaded other values.

    Parameters that are replicated over axes of their mesh (HSDP, and in part tensor parallelism) get the values of the
    first rank on these axes; buffers of sharded modules get those of the first rank of the module's data-parallel mesh.
    Plain parameters, such as those of `ignored_params`, stay: they may be each rank's own.

    Collective over the meshes of the module.

    Raises:
        RuntimeError: if a forward or backward has not ended.
    """
    for submodule in module.modules():
        if (state := state_of(submodule)) is not None:
            state.schedule.refuse_unended("broadcast_replicas was called")
            for group in state.groups:
                group.reshard()
                group.schedule.context.wait_until_peers_have_read()
    parameters = [one for one in module.parameters() if isinstance(one, DTensor)]
    held = [(local_of(one), groups_of_copies(one), one.device_mesh.device_type) for one in parameters]
    held += [(buffer, list(mesh.process_groups), mesh.mesh.device_type) for _, buffer, mesh in buffers_of_ranks(module)]
    for tensor, groups, device_type in held:
        for ranks in groups:
            on_wire = tensor.detach().to(device_type).contiguous()
            dist.broadcast(bytes_of(on_wire), group=ranks, group_src=0)  # gloo lacks some dtypes
            if on_wire.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(on_wire)
