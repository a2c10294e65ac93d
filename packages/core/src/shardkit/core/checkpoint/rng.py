"""The random generators of this process: torch's on CPU and on the current device, Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from shardkit.core.checkpoint.errors import DamagedCheckpointError

__all__ = ["get_rng_state", "set_rng_state"]


def get_rng_state() -> dict[str, Any]:
    """All generators, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], position, has_gauss, gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `get_rng_state` gave; a generator that is missing there stays as it is."""
    try:
        if "cpu" in state:
            torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if "python" in state:
            random.setstate(state["python"])
        if "numpy" in state:
            kind, keys, position, has_gauss, gauss = state["numpy"]
            np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(f"rng: the state of a random generator does not fit: {error}") from error
