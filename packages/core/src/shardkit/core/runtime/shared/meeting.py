"""Determines whether all ranks of a process group are on this host, and connects them.

Note [Strangers]
Every user of the host can list sockets, and connect to those of the abstract namespace. A rank therefore listens in a
directory that only its own user can enter: the kernel refuses everyone else before a connection takes a place in the
queue. Over the process group, ranks tell each other where they listen, and a secret. A caller sends its rank and the
secret of the rank that it calls. A connection succeeds before it is accepted, and what is sent on it waits there. So
once all ranks have said that they have called, each accepts without waiting, and hangs up on everyone else.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardkit.core.runtime.shared import segment
from shardkit.core.runtime.shared.neighbours import Neighbours
from shardkit.core.torch_compat import timeout_of

_SECRET = 16  # bytes
_QUEUE = 4096  # callers that the kernel lets wait: more than the ranks of a host
_RETRY = 0.001  # seconds

_T = TypeVar("_T")

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, Neighbours | None] = weakref.WeakKeyDictionary()


def possible() -> bool:
    """Whether this process can share memory, and sharing is not disabled (`SHARDKIT_SHARED_MEMORY=0`)."""
    return segment.available() and os.environ.get("SHARDKIT_SHARED_MEMORY", "1") != "0"


def neighbours_of(group: dist.ProcessGroup) -> Neighbours | None:
    """Connections to the other ranks of `group`, None if one of them is on another host or does not share memory.

    Collective over `group` the first time, then cached; all ranks get the same answer.
    """
    if group not in _known:
        _known[group] = _meet(group)
    return _known[group]


@dataclass(frozen=True)
class _Invitation:
    """The address at which a rank listens.

    Attributes:
        host: identity of its host; empty: it does not share memory.
        directory: the directory of its socket.
        secret: the secret that its callers must send.
        memory: the path of a memory file, with which a caller tries whether it may open the rank's memory.
    """

    host: str = ""
    directory: str = ""
    secret: bytes = b""
    memory: str = ""


def _meet(group: dist.ProcessGroup) -> Neighbours | None:
    rank, world = group.rank(), group.size()
    timeout = timeout_of(group, torch.device("cpu"))
    with contextlib.ExitStack() as stack:
        listener, own = _listen(stack) if possible() else (None, _Invitation())
        invitations = _exchange(group, own)
        if listener is None or len({one.host for one in invitations}) > 1 or not own.host:
            return None
        deadline = time.monotonic() + timeout
        sockets: list[socket.socket | None] = [None] * world
        reached = all(_call(sockets, peer, invitations[peer], rank, deadline) for peer in range(rank))
        if not all(_exchange(group, reached)):
            for one in sockets:
                if one is not None:
                    one.close()
            return None
        _accept(listener, sockets, rank, own.secret)
    return Neighbours(sockets, timeout)


def _listen(stack: contextlib.ExitStack) -> tuple[socket.socket | None, _Invitation]:
    """A socket that listens until `stack` closes, in a directory of its own (see Note [Strangers])."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = "/".join(str(Path("/proc/self/ns", kind).stat().st_ino) for kind in ("net", "user", "mnt", "pid"))
        directory = _private_directory()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.setblocking(False)
        with _short_path(directory) as path:
            listener.bind(path)
        listener.listen(_QUEUE)
        memory = segment.memory_file("shardkit-meeting")
    except (OSError, segment.NoSharedMemoryError):
        return None, _Invitation()
    stack.callback(os.close, memory)
    host = f"{boot}/{spaces}/{os.getuid()}"
    return listener, _Invitation(host, directory, secrets.token_bytes(_SECRET), segment.path_of(memory))


def _private_directory() -> str:
    """A new directory that only this user can enter."""
    for parent in (None, "/dev/shm"):
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix="shardkit-", dir=parent)
    raise OSError(errno.ENOENT, "no directory to put a socket into; set TMPDIR to one that is writable")


@contextlib.contextmanager
def _short_path(directory: str) -> Iterator[str]:
    """A path to the socket in `directory` that is short enough for an address of 107 bytes."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def _exchange(group: dist.ProcessGroup, own: _T) -> list[_T]:
    """The values of all ranks, in order of ranks (collective)."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def _call(sockets: list[socket.socket | None], peer: int, invitation: _Invitation, rank: int, deadline: float) -> bool:
    """Connects to a rank before this one, and identifies itself. False if that is impossible."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sockets[peer] = connection
    connection.setblocking(False)
    try:
        with _short_path(invitation.directory) as path:
            while (error := connection.connect_ex(path)) == errno.EAGAIN and time.monotonic() < deadline:
                time.sleep(_RETRY)  # its queue is full
        if error:
            return False
        os.close(os.open(invitation.memory, os.O_RDWR))
        connection.send(rank.to_bytes(4, "little") + invitation.secret)
    except OSError:
        return False
    return True


def _accept(listener: socket.socket, sockets: list[socket.socket | None], rank: int, secret: bytes) -> None:
    """Accepts the calls of all ranks after this one, which have called by now; hangs up on others: Note [Strangers]."""
    while None in sockets[rank + 1 :]:
        caller, _ = listener.accept()
        try:
            greeting = caller.recv(4 + len(secret) + 1, socket.MSG_DONTWAIT)
        except OSError:
            greeting = b""
        peer = int.from_bytes(greeting[:4], "little")
        if hmac.compare_digest(greeting[4:], secret) and rank < peer < len(sockets) and sockets[peer] is None:
            sockets[peer] = caller
        else:
            caller.close()
