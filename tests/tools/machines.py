"""Descriptions of machines for tests that compute times by hand."""

from typing import Any

from shardkit.tools.machine import Efficiency, Link, Machine


def machine(**changes: Any) -> Machine:
    """Of two devices that reach their peaks and take no time for anything else."""
    given = {
        "name": "simple", "device": "cuda", "transport": "nccl", "flops": {"float32": 1.0}, "memory_bandwidth": 1.0,
        "memory": 1000, "ranks_per_host": 2, "inside": Link(10.0, 1.0), "between": Link(1.0, 3.0),
        "efficiency": Efficiency(1.0, 1.0, 1.0), "operator_seconds": 0.0, "storage_bandwidth": 1.0, "process_bytes": 0,
    }  # fmt: skip
    return Machine(**given | changes)
