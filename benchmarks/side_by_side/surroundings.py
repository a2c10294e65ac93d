"""Facts that a figure needs beside it: machine, versions, commit, load."""

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from side_by_side.networks import OPTIMIZERS

_CPUINFO = Path("/proc/cpuinfo")


def surroundings(device: str, optimizer: str, link: str | None) -> dict[str, Any]:
    """Facts about this run, as JSON types. The commit ends with `+` where the working tree differs from it."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "load": load(),
        "optimizer": OPTIMIZERS[optimizer],
        "link": link or "loopback",
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    return facts


def load() -> float:
    """The load average of the last minute: with more than there are cores, absolute times say little."""
    return round(os.getloadavg()[0], 1)


def _cpu() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    def git(*args: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
