"""Processes of other users, and processes of this user that are not ranks, while ranks meet and train."""

import contextlib
import fcntl
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.core import fully_shard
from shardkit.core.runtime.shared import meeting, segment
from shardkit.core.runtime.shared.meeting import neighbours_of
from shardkit.core.runtime.shared.segment import Mapping, Segment
from tests.support import on_ranks, run_ranks

NOBODY = 65534
_GARBAGE = (b"", b"\0" * 4, b"\1\0\0\0", b"x" * 100)


def _train(rank: int, world_size: int) -> list[torch.Tensor]:
    """Meets anew for several groups, and trains on each."""
    weights = []
    for seed in range(8):
        group = dist.new_group()
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.full((2, 5), float(rank + step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert neighbours_of(group) is not None
        weights += [parameter.full_tensor() for parameter in model.parameters()]
    return weights


def _sockets() -> Iterator[bytes]:
    """Addresses of all sockets that there are, and of those that ranks may have in temporary directories."""
    for line in Path("/proc/net/unix").read_bytes().splitlines()[1:]:
        address = line.split(maxsplit=7)[7:]
        if address:
            yield b"\0" + address[0][1:] if address[0].startswith(b"@") else address[0]
    for parent in (tempfile.gettempdir(), "/dev/shm"):
        yield from (os.fsencode(path / "socket") for path in Path(parent).glob("shardkit*"))


def _attack(stop: Event, seen: Any, reached: Any) -> None:
    """Connects as another user to whatever there is, again and again: says nothing, sends garbage, does not hang up."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    held: list[socket.socket] = []
    while not stop.is_set():
        for address in _sockets():
            if b"shardkit" not in address and b"/proc/self/fd" not in address:
                continue
            seen.value += 1
            for number in range(8):
                caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                caller.setblocking(False)
                with contextlib.suppress(OSError):
                    caller.connect(address)
                    reached.value += 1
                    if number % 2:
                        caller.send(_GARBAGE[number // 2 % len(_GARBAGE)])
                held.append(caller)
        for caller in held[:-200]:
            caller.close()
        del held[:-200]


@contextlib.contextmanager
def _attackers() -> Iterator[tuple[Any, Any]]:
    context = multiprocessing.get_context("fork")
    stop, seen, reached = context.Event(), context.Value("i", 0), context.Value("i", 0)
    attackers = [context.Process(target=_attack, args=(stop, seen, reached)) for _ in range(2)]
    for one in attackers:
        one.start()
    try:
        yield seen, reached
        assert all(one.is_alive() for one in attackers)
    finally:
        stop.set()
        for one in attackers:
            one.join()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_user_cannot_disturb_training() -> None:
    expected = run_ranks(3, _train)
    with _attackers() as (seen, reached):
        found = run_ranks(3, _train, timeout=120)
    assert seen.value > 0, "there was nothing to attack"
    assert reached.value == 0
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))


@on_ranks(2, isolated=True)
def test_callers_without_the_secret_are_turned_away(rank: int, world_size: int) -> None:
    """Before rank 1 calls rank 0, others do who are silent, or wrong in one way each."""
    real = meeting._call
    secrets: list[bytes] = []

    def call(sockets: Any, peer: int, invitation: Any, own: int, deadline: float) -> bool:
        for greeting in (None, b"", b"\1\0\0\0" + b"0" * 32, b"\0\0\0\0" + invitation.secret, b"\1\0\0\0"):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with meeting._short_path(invitation.directory) as path:
                stranger.connect(path)
            if greeting is not None:
                stranger.send(greeting)
            strangers.append(stranger)
        secrets.append(invitation.secret)
        return real(sockets, peer, invitation, own, deadline)

    strangers: list[socket.socket] = []
    meeting._call = call
    try:
        neighbours = neighbours_of(dist.new_group())
    finally:
        meeting._call = real
    assert neighbours is not None
    assert len(set(secrets)) == rank
    if rank:
        for stranger in strangers[1:]:
            stranger.settimeout(60)
            assert stranger.recv(1) == b"", "hung up"


def _left_behind(rank: int, world_size: int, directory: str) -> list[str]:
    os.environ["TMPDIR"] = directory
    tempfile.tempdir = None
    try:
        assert neighbours_of(dist.new_group()) is not None
        dist.barrier()
        return [path.name for path in Path(directory).iterdir()]
    finally:
        tempfile.tempdir = None


def test_nothing_is_left_behind_and_long_paths_do(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    assert run_ranks(2, _left_behind, str(directory), isolated=True) == [[], []]


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
