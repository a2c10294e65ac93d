"""Where registered memory lies: the same question of a GPU and of the simulated device."""

from typing import Any

from torch import Tensor


def lies_in_pool(module: Any, tensor: Tensor) -> bool:
    """Whether `tensor` lies in the pool that the group of `module` gathers into. Call it after a gather."""
    (group,) = module._get_fsdp_state().groups
    pool, _ = group.transports.gather.registered_memory.args
    segments = pool.snapshot()
    at = tensor.data_ptr()
    return any(one["address"] <= at < one["address"] + one["total_size"] for one in segments)
