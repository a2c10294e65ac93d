"""Before, during and after a run: estimate, plan, profile, report, doctor and watch, and the `shardkit` command.

Names are imported on first use, so that one tool does not load the others.
"""

from __future__ import annotations

import importlib
from typing import Any

# Public name -> the module that has it.
_HOMES = {
    "Estimate": "estimating",
    "estimate": "estimating",
    "EstimateError": "estimating",
    "Machine": "machine",
    "MachineError": "machine",
    "Policies": "estimating",
    "TrainingJob": "estimating",
    "estimate_job": "estimating",
    "load_machine": "machine",
    "preset": "machine",
    "Finding": "doctor",
    "Profile": "profiling",
    "Report": "report",
    "ReportError": "report",
    "diagnose": "doctor",
    "profile": "profiling",
    "read_report": "report",
    "write_report": "report",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
