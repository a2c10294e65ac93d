"""Findings: what a report says is wrong with a run, what it costs, and what to change."""

from shardkit.tools.doctor.diagnosis import diagnose
from shardkit.tools.doctor.finding import Finding

__all__ = ["Finding", "diagnose"]
