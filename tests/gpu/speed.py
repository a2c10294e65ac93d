"""Step and host time of stock, ours and the model alone in turn, and what a profile shows of streams."""

import gzip
import json
from typing import Any

import torch

from tests.gpu.training import NETWORKS, empty_cache, in_turn, synchronize, trainer
from tests.gpu.worlds import ON_CPU, Place, needs_gpu

_ROUNDS, _TIMES = (2, 1) if ON_CPU else (8, 3)
_LONG_GAP = 10.0  # microseconds between two kernels of the compute stream
_LARGEST = 15 * 2**20


def turns(place: Place, model: str) -> dict[str, Any]:
    """Milliseconds of a step, and of the host in it. Each with the optimizer's step and without."""
    network = NETWORKS[model]
    empty_cache()
    made = {engine: trainer(engine, network, place, bf16=True) for engine in ("alone", "stock", "ours")}
    steps = in_turn({name: one.step for name, one in made.items()}, _ROUNDS, _TIMES)
    parts = in_turn({name: one.without_update for name, one in made.items()}, _ROUNDS, _TIMES)
    found = {name: {**steps[name], "without_optimizer": parts[name]} for name in made}
    shown = ", ".join(f"{name} {one['ms']:.1f} (host {one['host_ms']:.1f})" for name, one in found.items())
    return {**found, "world": place.world, "text": f"ms a step: {shown}"}


def profile(place: Place, engine: str) -> dict[str, Any]:
    """Kernels and gaps by stream over three steps; leaves the profile in the results if it is not too large."""
    one = trainer(engine, NETWORKS["llama-1.3b"], place, bf16=True)
    for _ in range(3):
        one.step()
    synchronize()
    with torch.profiler.profile() as profiled:
        for _ in range(3):
            one.step()
        synchronize()
    path = place.directory / f"profile-{engine}.json"
    profiled.export_chrome_trace(str(path))
    text = path.read_bytes()
    path.unlink()
    packed = gzip.compress(text)
    needs_gpu()
    if len(packed) < _LARGEST:
        path.with_suffix(".json.gz").write_bytes(packed)
    return streams(json.loads(text)["traceEvents"])


def streams(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernels and gaps of each stream in a trace; the compute stream is the one with the most kernel time."""
    kernels: dict[int, list[tuple[float, float, str]]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            begin, spent = float(event["ts"]), float(event["dur"])
            kernels.setdefault(event["args"]["stream"], []).append((begin, begin + spent, event["name"]))
    busy = {stream: sum(end - begin for begin, end, _ in own) for stream, own in kernels.items()}
    compute = max(busy, key=lambda stream: busy[stream])
    gaps, until = [], 0.0
    for begin, end, _ in sorted(kernels[compute]):
        if until and begin - until > 0:
            gaps.append(begin - until)
        until = max(until, end)
    names = [name for own in kernels.values() for _, _, name in own]
    idle, long = sum(gaps) / 1e3, sum(gap > _LONG_GAP for gap in gaps)
    return {
        "busy_ms": {str(stream): round(spent / 1e3, 2) for stream, spent in busy.items()},
        "kernels": {str(stream): len(own) for stream, own in kernels.items()},
        "nccl_kernels": sum("nccl" in name.lower() or "oneRank" in name for name in names),
        "gap_ms": round(idle, 2),
        "long_gaps": long,
        "text": f"three steps: {len(names)} kernels on {len(kernels)} streams, the compute stream busy "
        f"{busy[compute] / 1e3:.1f} ms and idle {idle:.1f} ms, in {long} gaps above {_LONG_GAP:.0f} us",
    }
