"""A whole training step as a CUDA graph: replays train as eager steps do, and how much time they save."""

from typing import Any

import torch

from tests.gpu.training import ENGINES, in_turn, inputs, layers
from tests.gpu.worlds import ON_CPU, Place, needs_gpu


def replayed(place: Place, engine: str, kept: bool) -> dict[str, Any]:
    """Two models see the same inputs; the second trains by replays. Of stock it is only said whether it can."""
    try:
        return _replayed(place, engine, kept)
    except (RuntimeError, AssertionError) as error:
        if engine == "ours":
            raise
        return {"text": f"stock cannot: {str(error).splitlines()[0][:150]}"}


def _replayed(place: Place, engine: str, kept: bool) -> dict[str, Any]:
    models = [layers(ENGINES[engine], place.mesh(), reshard_after_forward=not kept) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), capturable=not ON_CPU) for model in models]
    x = inputs(models[0], place.rank, 0, place.device)
    losses = [torch.zeros((), device=place.device) for _ in models]

    def step(number: int) -> None:
        loss = models[number](x).square().mean()
        loss.backward()
        losses[number].copy_(loss.detach())
        optimizers[number].step()
        optimizers[number].zero_grad()

    if ON_CPU:
        for number in (0, 1) * 3:
            step(number)
    needs_gpu()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in (0, 1) * 3:
            step(number)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step(1)
    for number in range(1, 6):
        x.copy_(inputs(models[0], place.rank, number, place.device))
        step(0)
        graph.replay() if number < 5 else step(1)
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for eager, again in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(again.to_local(), eager.to_local(), rtol=1e-5, atol=1e-7)
    times = in_turn({"eager": lambda: step(0), "replayed": graph.replay}, rounds=8, times=5)
    said = f"eager {times['eager']['ms']:.2f} ms, replayed {times['replayed']['ms']:.2f} ms"
    return {**times, "text": f"{said} (host {times['eager']['host_ms']:.2f}, {times['replayed']['host_ms']:.2f})"}
