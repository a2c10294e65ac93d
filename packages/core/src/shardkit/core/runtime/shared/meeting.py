"""How the ranks of a process group find out whether all of them are on this host, and connect."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from shardkit.core.runtime.shared import segment
from shardkit.core.runtime.shared.neighbours import Neighbours
from shardkit.core.torch_compat import timeout_of

__all__ = ["neighbours_of", "possible"]

_RECORD = 128  # bytes of what the ranks tell each other before they meet

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, Neighbours | None] = weakref.WeakKeyDictionary()


def possible() -> bool:
    """Whether this process can share memory at all, and was not told not to (`SHARDKIT_SHARED_MEMORY=0`)."""
    return segment.available() and os.environ.get("SHARDKIT_SHARED_MEMORY", "1") != "0"


def neighbours_of(group: dist.ProcessGroup) -> Neighbours | None:
    """Connections to the other ranks of `group`, None if one of them is elsewhere or will not share memory.

    Collective over `group` the first time, a look-up afterwards; all ranks get the same answer.
    """
    if group not in _known:
        _known[group] = _meet(group)
    return _known[group]


def _meet(group: dist.ProcessGroup) -> Neighbours | None:
    rank, world = group.rank(), group.size()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) if possible() else None
        records = _exchange(group, _invite(listener, world))
        if listener is None or len({place for place, _ in records}) > 1 or not records[0][0]:
            return None
        timeout = timeout_of(group, torch.device("cpu"))
        sockets: list[socket.socket | None] = [None] * world
        reached = _connect(sockets, [name for _, name in records], rank)
        # A connection succeeds before it is accepted, so all ranks know whether to go on before anyone waits.
        if not all(flag == b"yes" for flag, _ in _exchange(group, (b"yes" if reached else b"no", b""))):
            for one in sockets:
                if one is not None:
                    one.close()
            return None
        listener.settimeout(timeout)
        while None in (*sockets[:rank], *sockets[rank + 1 :]):
            connection, _ = listener.accept()
            if _is_ours(connection):
                sockets[int.from_bytes(connection.recv(4), "little")] = connection
            else:
                connection.close()
    return Neighbours(sockets, timeout)


def _invite(listener: socket.socket | None, world: int) -> tuple[bytes, bytes]:
    """Where this process is (empty: it will not share) and the name under which it listens.

    Sockets with such names and memory files live in the kernel: one boot, one network namespace, one user.
    """
    if listener is None:
        return b"", b""
    name = b"shardkit-" + secrets.token_hex(16).encode()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        network, users = (Path("/proc/self/ns", kind).stat().st_ino for kind in ("net", "user"))
        listener.bind(b"\0" + name)
        listener.listen(world)
    except OSError:
        return b"", b""
    return b"%s/%d/%d/%d" % (boot, network, users, os.getuid()), name


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user: any user can see the names of such sockets."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _exchange(group: dist.ProcessGroup, record: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Every rank's two byte strings (collective)."""
    packed = b"\0".join(record).ljust(_RECORD, b"\0")
    assert len(packed) == _RECORD
    own = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own, group=group)
    fields = [bytes(one.tolist()).split(b"\0") for one in everyone]
    return [(field[0], field[1]) for field in fields]


def _connect(sockets: list[socket.socket | None], names: list[bytes], rank: int) -> bool:
    """Connects to every rank before this one and says who is calling."""
    for peer in range(rank):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sockets[peer] = connection
        try:
            connection.connect(b"\0" + names[peer])
            connection.send(rank.to_bytes(4, "little"))
        except OSError:
            return False
    return True
