"""Profiling: what each rank did, held and waited for, by module."""

from shardkit.tools.profile.session import Profile, profile

__all__ = ["Profile", "profile"]
