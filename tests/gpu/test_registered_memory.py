"""Memory of the process group on GPUs: the same training, and unsharded parameters in NCCL's pool."""

from typing import Any

import pytest
import torch

import shardkit.core as shardkit
from tests.gpu.gpus import needs_gpu, run_on_gpus
from tests.gpu.test_training import _inputs, _layers
from tests.support import rank_mesh
from tests.support.pools import lies_in_pool


def _trained(mesh: Any, rank: int, registered: bool) -> tuple[Any, list[torch.Tensor]]:
    model = _layers(shardkit, mesh)
    for module in (model, *model) if registered else ():
        module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(_inputs(mesh, rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, [parameter.to_local().clone() for parameter in model.parameters()]


def _in_the_pool(rank: int, world_size: int) -> None:
    mesh = rank_mesh((world_size,))
    _, expected = _trained(mesh, rank, registered=False)
    model, seen = _trained(mesh, rank, registered=True)
    for ours, plain in zip(seen, expected, strict=True):
        if world_size == 2:
            assert torch.equal(ours, plain)
        else:  # NCCL may sum in another order where memory is registered
            torch.testing.assert_close(ours, plain)
    model[0].unshard()
    assert lies_in_pool(model[0], model[0][0].weight)
    assert not lies_in_pool(model[0], expected[0])


@needs_gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_training_in_memory_of_the_process_group(world_size: int) -> None:
    run_on_gpus(world_size, _in_the_pool)
