"""The most memory that a rank has held, less the memory that it held when the meter was made."""

import gc
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_SHARES = Path("/proc/self/smaps_rollup")
_SAMPLE_SECONDS = 0.003
_RESET_PEAK = "5"


class MemoryMeter:
    """Make it before the network is built.

    On a CPU: resident memory, as the kernel counts its peak. Where a peak cannot be reset (anywhere but on Linux),
    `restart` does nothing and the peak is that of the whole run. On CUDA: allocated and reserved device memory.

    A page that several processes map is resident in each of them. `held_during` counts it by shares instead, so that
    the ranks' figures add up to the machine's total.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        self._before = 0 if device.type == "cuda" else _resident()
        self._share_before = _share()
        self.restart()

    def restart(self) -> None:
        """Forget the peak so far."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif _CLEAR.exists():
            _CLEAR.write_text(_RESET_PEAK)

    def peaks(self) -> dict[str, int]:
        """Bytes: `resident`, or `allocated` and `reserved`."""
        if self.device.type == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.max_memory_reserved(self.device),
            }
        return {"resident": _peak_resident() - self._before}

    def held_during(self, step: Callable[[], None]) -> int | None:
        """Most bytes, shared pages by shares, seen while `step` runs; sampled, so nothing is to be timed meanwhile.

        None where the kernel does not count them.
        """
        if self._share_before is None:
            return None
        seen = [0]
        done = threading.Event()

        def sample() -> None:
            while not done.wait(_SAMPLE_SECONDS):
                seen.append(_share() or 0)

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            step()
        finally:
            done.set()
            sampler.join()
        return max(seen) - self._share_before


def _share() -> int | None:
    if not _SHARES.exists():
        return None
    line = next(line for line in _SHARES.read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def _resident() -> int:
    return _from_status("VmRSS:") if _STATUS.exists() else _peak_resident()


def _peak_resident() -> int:
    if _STATUS.exists():
        return _from_status("VmHWM:")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _from_status(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
