"""Profiling: what each rank did, held and waited for, by module."""

from shardkit.tools.profiling.session import Profile, profile

__all__ = ["Profile", "profile"]
