"""A user's settings for a parameter group, and for prefetching, as immutable values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardkit.core.mesh import PostForwardMesh
from shardkit.core.policies import MixedPrecisionPolicy
from shardkit.core.runtime.choice import Communication

DEFAULT_PREFETCH_DEPTH = 1


@dataclass(frozen=True)
class Prefetch:
    """How far ahead groups are gathered: a depth, a budget in bytes, or neither, which means a depth of one."""

    depth: int | None = None
    budget: int | None = None


@dataclass(frozen=True)
class GroupSettings:
    """See the arguments of `fully_shard` and the methods of `FSDPModule` with these names.

    Attributes:
        post_forward_mesh: the subgroup that holds the parameters between forward and backward, or None.
        keep_unsharded_storage: whether resharding keeps the unsharded storage's memory, so its addresses never change.
        max_reduce_inputs: number of groups whose unsharded gradients may be in reduction at once.
        native_all_reduce: False if `all_reduce_hook` itself combines replicas.
        all_reduce_hook: runs on flat reduced gradients, in place, on `all_reduce_hook_stream` if there is one.
    """

    reshard_after_forward: bool
    mp_policy: MixedPrecisionPolicy
    post_forward_mesh: PostForwardMesh | None
    communication: Communication
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_unsharded_storage: bool = False
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reduce_unused_params: bool = False
    max_reduce_inputs: int = 1
    gradient_divide_factor: float | None = None
    force_sum_reduction: bool = False
    native_all_reduce: bool = True
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: Any = None
