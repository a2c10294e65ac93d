"""A network of one link, shaped to a rate, between two halves of the ranks (see network_namespaces(7), tc-tbf(8))."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RATES = ("100mbit", "1gbit", "10gbit")
"""The values of `--link`: bits a second in each direction."""

_CLONE_NEWNET = 0x40000000
_BURST = "256kb"
_QUEUED = "50ms"
"""A packet that would wait longer than this is dropped, so TCP slows down as on a real link."""


class NoLink(RuntimeError):
    """This machine or this user cannot have network namespaces with a shaped link."""


@dataclass(frozen=True)
class Side:
    """One end of the link: the namespace, and the interface that gloo has to use in it."""

    namespace: str
    interface: str

    def enter(self) -> None:
        """Move this process into the namespace. Call it before any thread starts: threads move one by one."""
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns({self.namespace})")
        finally:
            os.close(descriptor)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


@contextmanager
def shaped_link(rate: str) -> Iterator[tuple[Side, Side]]:
    """Two namespaces with a link of `rate` between them; both are removed with the block.

    Raises `NoLink` where the programs `ip` and `tc`, or the rights to use them, are missing.
    """
    if os.geteuid() != 0:
        raise NoLink("--link makes network namespaces, which only root may do: run it as root")
    name = f"compare{os.getpid()}"
    sides = Side(f"{name}a", "linka"), Side(f"{name}b", "linkb")
    try:
        for side in sides:
            _run("ip", "netns", "add", side.namespace)
        ends = [("name", side.interface, "netns", side.namespace) for side in sides]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number, side in enumerate(sides, 1):
            inside = ("ip", "-n", side.namespace)
            _run(*inside, "addr", "add", f"10.213.77.{number}/24", "dev", side.interface)
            _run(*inside, "link", "set", side.interface, "up")
            _run(*inside, "link", "set", "lo", "up")
            shape = ("root", "tbf", "rate", rate, "burst", _BURST, "latency", _QUEUED)
            _run("tc", "-n", side.namespace, "qdisc", "add", "dev", side.interface, *shape)
        yield sides
    finally:
        for side in sides:
            if Path("/run/netns", side.namespace).exists():
                subprocess.run(["ip", "netns", "delete", side.namespace], check=False)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoLink(f"--link needs the program {command[0]!r} (iproute2), which is not installed") from None
    if done.returncode:
        raise NoLink(f"--link: {' '.join(command)} failed: {done.stderr.strip()}")
