"""Runs a user's training command in the foreground, and lets it end in its own way."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

__all__ = ["run_command"]


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a command and returns its exit status: 128 + the signal if one ended it, 127 if it cannot be started.

    Ctrl-C reaches the command too, which then ends its ranks; it is waited for. SIGTERM is handed on.
    """
    try:
        process = subprocess.Popen(command, env=dict(environment))
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be run: {error.strerror}\n")
        return 127
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        status = _outcome(process)
    finally:
        signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else 128 - status


def _outcome(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue
