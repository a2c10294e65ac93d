"""Profiling: the work, memory and waits of each rank, by module."""

from shardkit.tools.profiling.session import Profile, profile

__all__ = ["Profile", "profile"]
