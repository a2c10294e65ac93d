"""Hangs: when a collective waits too long, every rank that can says where it is, and one says who is missing."""

WATCH = "SHARDKIT_WATCH"
WATCH_SECONDS = "SHARDKIT_WATCH_SECONDS"
