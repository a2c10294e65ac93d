"""Peaks of allocated and reserved memory, stock's beside ours, at the third step and over fifty."""

from typing import Any

import torch

from tests.gpu.training import MIB, NETWORKS, empty_cache, reset_peak, synchronize, trainer
from tests.gpu.worlds import ON_CPU, Place, needs_gpu

_ALLOWED = 1.005  # of stock's peak of allocated bytes


def peaks(place: Place, model: str, precision: str) -> dict[str, Any]:
    """MiB of each engine. Wrong if ours needs more than stock."""
    found = {engine: _peaks_of(engine, place, model, precision == "bf16") for engine in ("stock", "ours")}
    needs_gpu()
    allocated, reserved, lasting = (
        f"{found['ours'][name]:.0f}/{found['stock'][name]:.0f}" for name in ("allocated", "reserved", "reserved_after")
    )
    text = f"ours/stock MiB: allocated {allocated}, reserved {reserved}, after 50 steps {lasting}"
    ratio = max(found["ours"][name] / found["stock"][name] for name in ("allocated", "allocated_later"))
    more = {"wrong": f"{ratio:.1%} of stock's peak. {text}"} if ratio > _ALLOWED else {}
    return {**found, "world": place.world, "text": text, **more}


def _peaks_of(engine: str, place: Place, model: str, bf16: bool) -> dict[str, float]:
    empty_cache()
    before = _now("allocated_bytes.all.current")
    made: Any = trainer(engine, NETWORKS[model], place, bf16=bf16)
    empty_cache()  # of the whole model, which was built first
    found = {}
    for name, steps in (("warm", 2), ("", 1), ("later", 3 if ON_CPU else 47)):
        reset_peak()
        for _ in range(steps):
            made.step()
        synchronize()
        found[f"allocated_{name}".rstrip("_")] = _now("allocated_bytes.all.peak") - before
        found[f"reserved_{name}".rstrip("_")] = _now("reserved_bytes.all.peak")
    found["reserved_after"] = _now("reserved_bytes.all.current")
    found["inactive_after"] = _now("inactive_split_bytes.all.current")
    found["retries"] = 0 if ON_CPU else torch.cuda.memory_stats().get("num_alloc_retries", 0)
    made = None
    empty_cache()
    found["left"] = _now("allocated_bytes.all.current") - before
    return found


def _now(name: str) -> float:
    """A statistic of the caching allocator, in MiB."""
    return 0.0 if ON_CPU else round(torch.cuda.memory_stats().get(name, 0) / MIB, 1)
