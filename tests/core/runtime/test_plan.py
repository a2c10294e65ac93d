"""Which transport a process group gets."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from shardkit.core.runtime.choice import coalesces, transport_for
from shardkit.core.runtime.shared.transport import SharedTransport
from tests.core.runtime.cases import CPU
from tests.support import on_ranks


@pytest.mark.parametrize(
    ("name", "wrapped", "direct"),
    [("nccl", False, True), ("nccl", True, False), ("nccl2", False, False), ("nccl-lazy", False, False)],
)
def test_a_backend_that_launches_each_collective_by_itself_gets_packed_buffers(
    name: str, wrapped: bool, direct: bool
) -> None:
    """All of them say that they coalesce; they need a GPU, so here their answers stand for them."""
    backend = SimpleNamespace(supports_coalescing=True, name=lambda: name, **({"wrapped_pg": None} if wrapped else {}))
    assert coalesces(backend) is direct
    assert not coalesces(SimpleNamespace(supports_coalescing=False, name=lambda: "mpi"))
    assert not coalesces(None)


@on_ranks(2, isolated=True)  # no model of another test holds the transport
def test_a_gloo_group_is_asked_once_and_not_kept(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    first = transport_for(group, CPU)
    assert isinstance(first, SharedTransport)
    assert transport_for(group, CPU) is first
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None, "the cache must not keep transports, which keep groups"
