"""Shards in pinned host memory: how fast they travel, and how much of the way is hidden behind computation."""

from typing import Any

import torch

from tests.gpu.training import ENGINES, NETWORKS, empty_cache, in_turn, trainer
from tests.gpu.worlds import ON_CPU, Place, needs_gpu

_BYTES = 2**20 if ON_CPU else 2**28


def bandwidth(place: Place) -> dict[str, Any]:
    """GB/s of copies of pinned memory, to the device and back."""
    host = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=not ON_CPU)
    device = torch.zeros(_BYTES, dtype=torch.uint8, device=place.device)
    works = {
        "to_device": lambda: device.copy_(host, non_blocking=True),
        "to_host": lambda: host.copy_(device, non_blocking=True),
    }
    times = in_turn(works, rounds=5)
    rates = {name: round(_BYTES / max(one["ms"], 1e-3) / 1e6, 1) for name, one in times.items()}
    needs_gpu()
    return {**rates, "text": f"{rates['to_device']} GB/s to the device, {rates['to_host']} GB/s back"}


def hidden(place: Place) -> dict[str, Any]:
    """Forward and backward with and without offload; the rest of the time that the copies take is hidden."""
    empty_cache()
    speed = bandwidth(place) if not ON_CPU else {"to_device": 1.0, "to_host": 1.0}
    works, sizes = {}, {}
    for engine in ("stock", "ours"):
        for offloads in (False, True):
            policy = ENGINES[engine].CPUOffloadPolicy(pin_memory=not ON_CPU)
            options = {"offload_policy": policy} if offloads else {}
            made = trainer(engine, NETWORKS["llama"], place, bf16=True, **options)
            name = f"{engine}{', offloaded' if offloads else ''}"
            works[name] = made.without_update
            sizes[name] = sum(p.to_local().nbytes for p in made.network.parameters())
    times = in_turn(works, rounds=2 if ON_CPU else 5)
    # Shards travel for forward and again for backward, fp32 gradients come back.
    copies = sizes["ours"] * (2 / speed["to_device"] + 1 / speed["to_host"]) / 1e6
    found: dict[str, Any] = {"ms": {name: one["ms"] for name, one in times.items()}, "copies_ms": round(copies, 1)}
    for engine in ("stock", "ours"):
        longer = times[f"{engine}, offloaded"]["ms"] - times[engine]["ms"]
        found[f"{engine}_hidden"] = round(1 - longer / copies, 3) if copies else 0.0
    needs_gpu()
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in found["ms"].items())
    return {**found, "text": f"ms: {parts}; of {copies:.0f} ms of copies hidden: {found['ours_hidden']:.0%}"}
