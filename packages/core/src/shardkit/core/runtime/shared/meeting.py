"""Determines whether all ranks of a process group are on this host, and connects them.

Note [Strangers]
A rank makes a pipe for each peer and tells it, over the process group, where in `/proc` its end is. The kernel lets
nobody but this user open it there, as with the memory that the ranks share. Ranks in containers see other processes
under the same numbers, so ranks compare their namespaces first, and each says what it has opened.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardkit.core.runtime.shared import segment
from shardkit.core.runtime.shared.connection import Connection
from shardkit.core.runtime.shared.neighbours import Neighbours
from shardkit.core.torch_compat import timeout_of

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
    """How the other ranks reach this one: for each, the path of the pipe's end to write to, and the pipe's inode."""

    host: str = ""  # identity of its host, user and namespaces; empty: it does not share memory
    pipes: Sequence[tuple[str, int]] = ()


def _meet(group: dist.ProcessGroup) -> Neighbours | None:
    rank, world = group.rank(), group.size()
    timeout = timeout_of(group, torch.device("cpu"))
    with contextlib.ExitStack() as until_met, contextlib.ExitStack() as unless_met:
        incoming, own = _invite(world, until_met, unless_met) if possible() else ([], _Invitation())
        invitations = _exchange(group, own)
        if len({one.host for one in invitations}) > 1 or not own.host:
            return None
        outgoing = [pipe for one in invitations for pipe in _opened(one, rank, unless_met)]
        if not all(_exchange(group, len(outgoing) == world)):
            return None
        unless_met.pop_all()
    connections = [Connection(peer, *ends) for peer, ends in enumerate(zip(incoming, outgoing, strict=True))]
    connections[rank].close()
    return Neighbours([*connections[:rank], None, *connections[rank + 1 :]], timeout)


def _invite(
    world: int, until_met: contextlib.ExitStack, unless_met: contextlib.ExitStack
) -> tuple[list[FileIO], _Invitation]:
    """This rank's ends of the pipes of `world` ranks, and the invitation to write to them."""
    incoming, pipes = [], list[tuple[str, int]]()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = "/".join(str(Path("/proc/self/ns", kind).stat().st_ino) for kind in ("user", "mnt", "pid"))
        for _ in range(world):
            reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            incoming.append(unless_met.enter_context(FileIO(reading, "r")))
            until_met.callback(os.close, writing)  # a peer's process must be the last to have it
            pipes.append((segment.path_of(writing), os.fstat(writing).st_ino))
    except OSError:
        return [], _Invitation()
    return incoming, _Invitation(f"{boot}/{spaces}/{os.getuid()}", pipes)


def _opened(invitation: _Invitation, rank: int, unless_met: contextlib.ExitStack) -> Iterator[FileIO]:
    """The end that this rank writes to, if it may open it."""
    path, inode = invitation.pipes[rank]
    with contextlib.suppress(OSError):
        pipe = FileIO(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "w")
        unless_met.push(pipe)
        if os.fstat(pipe.fileno()).st_ino == inode:
            yield pipe


def _exchange(group: dist.ProcessGroup, own: _T) -> list[_T]:
    """The values of all ranks, in order of ranks (collective)."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    return everyone
