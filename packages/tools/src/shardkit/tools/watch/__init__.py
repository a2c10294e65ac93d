"""Hangs: when a collective waits too long, the ranks report where they are, and one says who is missing."""

WATCH = "SHARDKIT_WATCH"
WATCH_SECONDS = "SHARDKIT_WATCH_SECONDS"
