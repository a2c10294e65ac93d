"""Runs a user's training command in the foreground, and lets it end in its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardkit.autoinstall import run
from shardkit.tools.terminal import print_error

__all__ = ["WATCH", "WATCH_SECONDS", "run_command"]

WATCH = "SHARDKIT_WATCH"
WATCH_SECONDS = "SHARDKIT_WATCH_SECONDS"


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a command and returns its exit status: 128 + the signal if one ended it, 127 if it cannot be started.

    Ctrl-C reaches the command too, which then ends its ranks; it is waited for. SIGTERM is handed on.
    """
    try:
        return run.run_command(command, environment)
    except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
        reason = error.strerror if isinstance(error, OSError) else error
        print_error(f"{command[0]} cannot be run: {reason}")
        return 127
