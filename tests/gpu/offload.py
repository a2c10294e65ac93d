"""Shards and activations in pinned host memory: speed of the copies, the part that is hidden, and the memory saved.

Whether the bits are the same is for `right.races`.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from shardkit.core.beyond import offload_activations, overlap_step
from tests.gpu.training import ENGINES, MIB, NETWORKS, Trainer, empty_cache, in_turn, reset_peak, synchronize, trainer
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


def overlapped(place: Place) -> dict[str, Any]:
    """Whole steps with shards on the host: FSDP2's and ours with the same AdamW, and ours under the next forward."""
    empty_cache()
    torch.set_num_threads(1 if ON_CPU else os.cpu_count() or 1)
    works = {}
    for name in ("stock", "plain", "ours"):
        engine = "stock" if name == "stock" else "ours"
        policy = ENGINES[engine].CPUOffloadPolicy(pin_memory=not ON_CPU)
        made = trainer(engine, NETWORKS["uniform"], place, bf16=True, offload_policy=policy)
        if name == "ours":
            overlap_step(made.optimizer)
        works[name] = _from_optimizer(made)
    times = in_turn(works, rounds=2 if ON_CPU else 5)
    needs_gpu()
    parts = ", ".join(f"{name} {one['ms']:.1f}" for name, one in times.items())
    return {**times, "text": f"ms: {parts} (overlapped)"}


def _from_optimizer(made: Trainer) -> Callable[[], None]:
    """A step that begins with the optimizer, so that forward, under which it may run, belongs to the same step."""
    made.forward_backward()

    def step() -> None:
        made.optimizer.step()
        made.optimizer.zero_grad()
        made.forward_backward()

    return step


def activations(place: Place) -> dict[str, Any]:
    """MiB at the peak of forward and of all, and time, without and with activations on the host.

    Wrong if forward saves less than half of the bytes that were moved.
    """
    found = {name: _with_activations(place, name == "moved") for name in ("kept", "moved")}
    kept, moved = found["kept"], found["moved"]
    assert kept["loss"] == moved["loss"] and moved["host"] > 0, found
    needs_gpu()
    columns = ", ".join(f"{name} {moved[name]:.0f}/{kept[name]:.0f}" for name in ("forward", "peak", "ms"))
    text = f"moved/kept, MiB and ms: {columns}; {moved['host']:.0f} MiB on the host"
    short = kept["forward"] - moved["forward"] < moved["host"] / 2
    return {**found, "text": text, **({"wrong": f"forward needs too much: {text}"} if short else {})}


def _with_activations(place: Place, moves: bool) -> dict[str, float]:
    empty_cache()
    made = trainer("ours", NETWORKS["llama-1.3b"], place, bf16=True)
    offload = None
    if moves:
        directory, least = (place.directory, 1) if ON_CPU else (None, MIB)
        offload = offload_activations(made.network, min_bytes=least, directory=directory)
    made.without_update()  # makes the gathers' memory, and that of the host
    reset_peak()
    loss = made.network(*made.batch)
    forward = _peak()
    loss.backward()
    made.optimizer.zero_grad()
    reset_peak()
    ms = in_turn({"": made.without_update}, rounds=2 if ON_CPU else 5)[""]["ms"]
    host = 0.0 if offload is None else offload.host_bytes / MIB
    return {"loss": loss.item(), "forward": forward, "peak": _peak(), "ms": ms, "host": host}


def _peak() -> float:
    synchronize()
    return 0.0 if ON_CPU else torch.cuda.max_memory_allocated() / MIB
