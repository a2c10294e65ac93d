"""Processes of other users, and ranks that do not reach each other, when ranks meet."""

import fcntl
import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardkit.core.runtime.shared import meeting, segment
from shardkit.core.runtime.shared.meeting import neighbours_of
from shardkit.core.runtime.shared.segment import Mapping, Segment
from tests.support import on_ranks

NOBODY = 65534


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_user_cannot_open_what_ranks_share() -> None:
    shared = Segment(4096)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        refused = 0
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            for path, flags in ((shared.path, os.O_RDWR), (segment.path_of(writing), os.O_WRONLY)):
                try:
                    os.open(path.replace(str(os.getpid()), str(os.getppid())), flags)
                except PermissionError:
                    refused += 1
        finally:
            os._exit(refused)
    os.close(reading)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


@pytest.mark.parametrize("what", ["another", "nothing"])
@on_ranks(2, isolated=True)
def test_ranks_that_do_not_reach_each_other_use_collectives(rank: int, world_size: int, what: str) -> None:
    """Rank 0 finds another pipe, or nothing, where rank 1 has said that one of its ends is."""
    real = meeting._exchange

    def exchange(group: Any, own: Any) -> list[Any]:
        found = real(group, own)
        if rank == 0 and isinstance(own, meeting._Invitation):
            path, inode = found[1].pipes[0]
            found[1] = replace(
                found[1], pipes=[(found[1].pipes[1][0], inode) if what == "another" else (path + "0", inode)]
            )
        return found

    with mock.patch.object(meeting, "_exchange", exchange):
        assert neighbours_of(dist.new_group()) is None


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@on_ranks(3, isolated=True)
def test_nothing_is_left_behind(rank: int, world_size: int) -> None:
    for _ in range(2):
        group = dist.new_group()
        before = _descriptors()
        assert neighbours_of(group) is not None
        assert _descriptors() == before + 4, "two pipes with each peer"
        meeting._known.pop(group)
        gc.collect()
        assert _descriptors() == before


# -- memory files ------------------------------------------------------------------------------------------------------


def test_the_size_of_memory_files_is_sealed() -> None:
    memory = Segment(4096)
    for nbytes in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, nbytes)
    seals = fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    assert seals & fcntl.F_SEAL_SEAL
    assert Mapping(memory.path).tensor(0, 4096, torch.uint8).sum() == 0


def test_memory_that_could_shrink_is_refused(tmp_path: Path) -> None:
    fd = segment.memory_file("unsealed")
    os.ftruncate(fd, 4096)
    with pytest.raises(ConnectionError, match="not sealed"):
        Mapping(segment.path_of(fd))
    os.close(fd)
    with (tmp_path / "file").open("w+b") as file, pytest.raises(ConnectionError, match="not sealed"):
        Mapping(str(file.name))
