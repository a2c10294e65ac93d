"""Memory of the process group, as far as a machine without a GPU goes; tests/simulation tests its use."""

import pytest
import torch
import torch.distributed as dist

from shardkit.core.runtime.memory import require_memory
from tests.support import on_ranks


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@on_ranks(2)
def test_a_backend_without_an_allocator_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"group '0\.weight'.*\(gloo\) cannot allocate memory on cpu; use.*NCCL"):
        require_memory(_group(), torch.device("cpu"), "0.weight")
