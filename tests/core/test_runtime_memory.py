"""Memory of the process group, as far as a machine without a GPU goes: tests/simulation has what is done with it."""

import pytest
import torch
import torch.distributed as dist

from shardkit.core.runtime import memory
from shardkit.core.runtime.memory import require_memory
from tests.support import run_ranks


class _Backend:
    def register_mem_pool(self, pool: object, symm: bool = False) -> None: ...


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _without_an_allocator(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"group '0\.weight'.*\(gloo\) cannot allocate memory on cpu; use.*NCCL"):
        require_memory(_group(), torch.device("cpu"), "registered", "0.weight")


def test_a_backend_without_an_allocator_is_refused() -> None:
    run_ranks(2, _without_an_allocator)


def _earlier_torch(rank: int, world_size: int) -> None:
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(memory.torch_compat, "backend_of", lambda group, device: _Backend())
        patched.setattr(torch.cpu, "MemPool", object, raising=False)
        for alike in (True, False):
            patched.setattr(memory, "_REUSES_ALIKE", alike)
            require_memory(_group(), torch.device("cpu"), "registered", "0.weight")
            if alike:
                require_memory(_group(), torch.device("cpu"), "symmetric", "0.weight")
                continue
            with pytest.raises(NotImplementedError, match=r"'0\.weight': symmetric memory needs torch 2\.13 or later"):
                require_memory(_group(), torch.device("cpu"), "symmetric", "0.weight")


def test_symmetric_memory_needs_a_torch_that_reuses_it_alike_on_all_ranks() -> None:
    run_ranks(1, _earlier_torch)
