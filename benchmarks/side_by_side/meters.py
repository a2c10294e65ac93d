"""Meters of one rank: the most memory that it has held beyond what it held before, and the bytes that it sends."""

import gc
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

_CLEAR = Path("/proc/self/clear_refs")
_SAMPLE_SECONDS = 0.003
_RESET_PEAK = "5"


class MemoryMeter:
    """Make it before the network is built.

    On a CPU: resident memory, as Linux counts its peak. On CUDA: allocated and reserved device memory.

    A page that several processes map is resident in each of them. `held_during` counts it by shares instead, so that
    the ranks' figures add up to the machine's total.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        self._before = 0 if device.type == "cuda" else _read("status", "VmRSS") * 1024
        self._share_before = _share()
        self.restart()

    def restart(self) -> None:
        """Forget the peak so far."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _CLEAR.write_text(_RESET_PEAK)

    def peaks(self) -> dict[str, int]:
        """Bytes: `resident`, or `allocated` and `reserved`."""
        if self.device.type == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.max_memory_reserved(self.device),
            }
        return {"resident": _read("status", "VmHWM") * 1024 - self._before}

    def held_during(self, step: Callable[[], None]) -> int:
        """Most bytes, shared pages by shares, seen while `step` runs; sampled, so nothing is to be timed meanwhile."""
        seen = [0]
        done = threading.Event()

        def sample() -> None:
            while not done.wait(_SAMPLE_SECONDS):
                seen.append(_share())

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            step()
        finally:
            done.set()
            sampler.join()
        return max(seen) - self._share_before


def _read(file: str, field: str) -> int:
    """A figure that Linux has about this process."""
    line = next(line for line in Path("/proc/self", file).read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1])


def _share() -> int:
    return _read("smaps_rollup", "Pss") * 1024


def socket_bytes(step: Callable[[], None]) -> int:
    """Bytes that the process writes while `step` runs: gloo's sockets, headers included, for every system alike."""
    before = _read("io", "wchar")
    step()
    return _read("io", "wchar") - before


def c10d_calls(step: Callable[[], None]) -> dict[str, int]:
    """Calls of process group operations by name while `step` runs, those from C++ (DDP's) included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    names = Counter(event.name for event in profiler.events())
    return {name.removeprefix("c10d::"): count for name, count in names.items() if name.startswith("c10d::")}
