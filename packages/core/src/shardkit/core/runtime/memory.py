"""Memory that is registered with the network: a pool of the device's allocator for one process group.

Note [Registered memory]: a tensor that is made, and a storage that is resized, get their memory from the pool that is
active on their thread. So registered memory changes where bytes lie and nothing else: plans, collectives and copies
are those of ordinary memory. The backend brings the pool's allocator (NCCL: ncclMemAlloc), and registers each segment
of the pool with the group's communicator when the allocator makes it.

    unsharded parameters, packed buffers,    in the pool
    outputs of reductions
    gradients                                where autograd has made them. A reduce-scatter reads those that go direct
                                             from there, unregistered: packing them first would cost the copy that the
                                             direct way saves. Its output is registered. Others are packed anyway.
    shards, parts kept in a smaller group    ordinary memory: copied into a slot, which is in the pool

NCCL can also register a pool as symmetric windows. It then relies on the buffers of one collective lying at the same
place of the same window on all ranks. A rank whose allocator gives memory back alone would break that without an error,
so the pool is not registered in that way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from shardkit.core import torch_compat

Pool: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]
"""Inside, this thread's allocations on the device come from the pool, on the stream that is current then."""


def registered_pool(group: dist.ProcessGroup, device: torch.device) -> Pool:
    """A new pool of `group` on `device` (collective). Call `require_memory` before."""
    backend, module = torch_compat.backend_of(group, device), torch.get_device_module(device)
    # Memory is registered with a communicator, and the first collective makes it.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    pool = module.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool)
    return functools.partial(module.use_mem_pool, pool, device)


def require_memory(group: dist.ProcessGroup, device: torch.device, label: str) -> None:
    """Checks that `group` can have registered memory on `device`. Not collective; `label` is the parameter group's."""
    backend = torch_compat.backend_of(group, device)
    if not hasattr(backend, "register_mem_pool") or not hasattr(torch.get_device_module(device), "MemPool"):
        raise ValueError(
            f"group '{label}': process group {group.group_name!r} ({group.name()}) cannot allocate memory on {device}; "
            "use a backend with a memory allocator, such as NCCL, or leave allocation to torch"
        )
