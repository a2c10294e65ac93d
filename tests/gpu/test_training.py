"""Training on GPUs: the same numbers as stock, no more memory, no wait on the host, and side streams."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn

import shardkit.core as shardkit
from tests.gpu.gpus import needs_device, needs_gpu, run_on_gpus
from tests.support import rank_mesh
from tests.support.features import model_for, runs_on
from tests.support.parity import Case, compare_training

FEATURES = (
    (),
    ("no_reshard",),
    ("bfloat16",),
    ("bfloat16_reduce_float32",),
    ("reduce_bfloat16",),
    ("output_float32",),
    ("offload",),
    ("dim_1",),
    ("grouped",),
    ("prefetch",),
    ("keep_after_backward",),
    ("unshard_async_op",),
    ("accumulate_no_sync",),
    ("explicit_unshard",),
    ("optimizer_in_backward",),
    ("clipped",),
    ("hsdp_2",),
    ("reshard_to_2",),
)


@needs_device
@pytest.mark.parametrize("features", FEATURES, ids="+".join)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_same_as_stock(world_size: int, features: tuple[str, ...]) -> None:
    """Bit for bit up to two ranks, whose sums have one order; beyond that NCCL chooses it."""
    if not runs_on(features, world_size):
        pytest.skip("the feature means nothing on that many ranks")
    model = model_for(features)
    assert model is not None
    exact = world_size <= 2
    case = Case(model, features, "adamw" if exact else "sgd", oracle_sums="rank order" if exact else "gloo")
    run_on_gpus(world_size, compare_training, case, shared=True)


def _layers(api: Any, mesh: Any, width: int = 512, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(12)))
    for layer in model:
        api.fully_shard(layer, mesh=mesh, **options)
    return api.fully_shard(model, mesh=mesh, **options)


def _inputs(mesh: Any, rank: int, step: int, width: int = 512) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(64, width, generator=generator).to(mesh.device_type)


def _peak(api: Any, mesh: Any, rank: int) -> int:
    """Bytes allocated at the peak of the third step."""
    model = _layers(api, mesh, width=2048)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(_inputs(mesh, rank, step, 2048)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _peaks(rank: int, world_size: int) -> tuple[int, int]:
    mesh = rank_mesh((world_size,))
    theirs = _peak(stock, mesh, rank)
    torch.cuda.empty_cache()
    return _peak(shardkit, mesh, rank), theirs


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_no_more_memory_than_stock(world_size: int) -> None:
    for ours, theirs in run_on_gpus(world_size, _peaks):
        assert ours <= theirs


def _step_without_waiting(rank: int, world_size: int) -> None:
    mesh = rank_mesh((world_size,))
    model = _layers(shardkit, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = _inputs(mesh, rank, 0)
    for step in range(4):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_never_waits_for_the_device(world_size: int) -> None:
    run_on_gpus(world_size, _step_without_waiting)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def _on_side_streams(rank: int, world_size: int) -> None:
    """Forward on one stream after an unshard on another gives the same gradients as both on one stream."""
    mesh = rank_mesh((world_size,))
    plain, sided = _layers(shardkit, mesh), _layers(shardkit, mesh)
    cuda = torch.cuda.is_available()
    streams = [torch.cuda.Stream() for _ in range(2)] if cuda else [None, None]
    for step in range(5):
        x = _inputs(mesh, rank, step)
        plain(x).square().mean().backward()
        if cuda:
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            handle = sided.unshard(async_op=True)
        with torch.cuda.stream(streams[1]):
            handle.wait()
            loss = sided(x).square().mean()
        if cuda:
            torch.cuda.current_stream().wait_stream(streams[1])
        loss.backward()
        for ours, expected in zip(_gradients(sided), _gradients(plain), strict=True):
            assert torch.equal(ours, expected), step
        for model in (plain, sided):
            model.zero_grad()


@needs_device
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_side_streams(world_size: int) -> None:
    run_on_gpus(world_size, _on_side_streams, shared=True)


def _offloaded(rank: int, world_size: int) -> None:
    """Pinned shards on the host train as shards on the device do; each processor rounds the step in its own way."""
    mesh = rank_mesh((world_size,))
    models = [
        _layers(shardkit, mesh),
        _layers(shardkit, mesh, offload_policy=shardkit.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())),
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(_inputs(mesh, rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for on_device, on_host in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert on_host.to_local().device.type == "cpu"
        assert on_host.to_local().is_pinned() == torch.cuda.is_available()
        torch.testing.assert_close(on_host.to_local(), on_device.to_local().cpu(), rtol=1e-6, atol=1e-7)


@needs_device
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_offload(world_size: int) -> None:
    run_on_gpus(world_size, _offloaded, shared=True)


def _captured(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Two models see the same inputs; the second trains by replays of one step."""
    mesh = rank_mesh((world_size,))
    models = [_layers(shardkit, mesh, **options) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), capturable=True) for model in models]
    x = _inputs(mesh, rank, 0)
    losses = [torch.zeros((), device="cuda") for _ in models]

    def step(place: int) -> None:
        loss = models[place](x).square().mean()
        loss.backward()
        losses[place].copy_(loss.detach())
        optimizers[place].step()
        optimizers[place].zero_grad()

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for place in (0, 1) * 3:
            step(place)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        step(1)
    for number in range(1, 6):
        x.copy_(_inputs(mesh, rank, number))
        step(0)
        graph.replay() if number < 5 else step(1)
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for eager, replayed in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(replayed.to_local(), eager.to_local(), rtol=1e-5, atol=1e-7)


@needs_gpu
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_replays_of_a_captured_step_train_as_eager_steps(world_size: int, reshard_after_forward: bool) -> None:
    run_on_gpus(world_size, _captured, {"reshard_after_forward": reshard_after_forward})
