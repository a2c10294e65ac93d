"""What has become of a process on this host, from /proc."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from shardkit.tools.report.decoding import decode

__all__ = ["Place"]

_STATES = {
    "T": "is stopped (SIGSTOP, or a shell's job control)",
    "t": "is stopped by a debugger",
    "D": "is in an uninterruptible wait, as for a disk or a file server",
    "Z": "has ended",
    "X": "has ended",
}


@dataclass(frozen=True)
class Place:
    """Where a rank's process runs. `started` tells it from a later process of the same number."""

    host: str
    boot: str
    pid: int
    started: str

    @staticmethod
    def of_this_process() -> Place:
        """The place of the caller."""
        return Place(socket.gethostname(), _boot(), os.getpid(), _stat(os.getpid())[1])

    @staticmethod
    def from_text(text: str) -> Place:
        """A place again. Raises `ValueError` for anything else."""
        return decode(Place, json.loads(text))

    def to_text(self) -> str:
        """The place as JSON."""
        return json.dumps(asdict(self))

    def condition(self) -> str:
        """What can be seen of the process from here."""
        who = f"process {self.pid} on {self.host}"
        if self.boot != _boot():
            return f"{who} does not answer: it has ended, is stopped, or cannot be reached"
        state, started = _stat(self.pid)
        if not state or started != self.started:
            return f"{who} has ended"
        return f"{who} {_STATES.get(state, 'is alive, but does not answer: something holds the interpreter')}"


def _boot() -> str:
    """Tells hosts apart, and containers of one host that do not see each other's processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _stat(pid: int) -> tuple[str, str]:
    """State and time of start of a process; empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
