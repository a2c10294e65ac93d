"""Strangers at the ports are turned away, and delay nobody; sizes are checked before memory is taken."""

import asyncio
import contextlib
import os
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shardkit.weights import WeightReceiver, WeightSender, targets_of
from shardkit.weights.wire import Connection, IOThread, call, listen, parse, secret_for, serve
from tests.weights.processes import TIMEOUT


@pytest.fixture
def io():
    thread = IOThread()
    yield thread
    thread.close()


@contextlib.contextmanager
def strangers(host, port, count):
    """Callers that say nothing, nonsense, or a great length."""
    with contextlib.ExitStack() as stack:
        for number in range(count):
            one = stack.enter_context(socket.create_connection((host, port), timeout=TIMEOUT))
            one.sendall((b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 200)[number % 3])
        yield


def test_strangers_at_both_ports_delay_nobody(cast):
    there = {"w": torch.zeros(9)}
    sender = cast.sender({"w": torch.ones(9)}, timeout=TIMEOUT)
    receiver = cast.receiver(targets_of(there), timeout=TIMEOUT)
    while not sender._coordinator._receivers:
        pass
    place = next(iter(sender._coordinator._receivers.values())).place
    with strangers(*parse(cast.address), 9), strangers(place["host"], place["port"], 9):
        sending = cast.threads.submit(sender.send, 1)
        assert receiver.receive() == 1
        sending.result(TIMEOUT)
    assert len(sender._coordinator._receivers) == 1 and len(sender._coordinator._senders) == 1
    assert there["w"].all()


def test_another_secret_is_refused(io, monkeypatch):
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    admitted = []

    async def peer(connection: Connection) -> None:
        admitted.append(await connection.receive())

    io.spawn(serve(listener, b"secret", peer))
    with pytest.raises(ConnectionError, match="does not know the same secret; set SHARDKIT_WEIGHTS_SECRET alike"):
        io.run(call("127.0.0.1", port, b"another"))
    assert not admitted
    io.run(io.run(call("127.0.0.1", port, b"secret")).send({"as": "friend"}))
    while not admitted:
        pass
    assert admitted == [{"as": "friend"}]


def test_a_server_without_the_secret_is_refused(io):
    """It could lead receivers to weights of its own."""

    async def meet() -> None:
        here, there = socket.socketpair()
        for one in (here, there):
            one.setblocking(False)
        caller, called = Connection(here), Connection(there)
        asyncio.get_running_loop().call_later(0.2, called.close)
        proofs = caller.prove(b"secret", caller=True), called.prove(b"guess", caller=False)
        results = await asyncio.gather(*proofs, return_exceptions=True)
        assert all(isinstance(one, ConnectionError) for one in results)

    io.run(meet())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff", "a message of 4294967295 bytes, expected at most"),
        (b"\x00\x00\x00\x02{]", "a message that is not JSON"),
        (b"\x00\x00\x00\x01", "has closed the connection"),
    ],
)
def test_a_message_without_sense_is_refused_before_memory_is_taken(io, data, words):
    async def read() -> None:
        here, there = socket.socketpair()
        here.setblocking(False)
        there.sendall(data)
        there.close()
        with pytest.raises(ConnectionError, match=words):
            await Connection(here).receive()
        here.close()

    io.run(read())


def test_a_bucket_of_another_size_is_refused(cast, monkeypatch):
    """The sender is ours, so that this is a bug or another version; the receiver keeps what it had."""
    there = {"w": torch.zeros(9)}
    send = Connection.send

    async def larger(self, message, data=None):
        if "at" in message:
            message = {**message, "nbytes": 1 << 40}
        await send(self, message, data)

    sender = cast.sender({"w": torch.ones(9)}, timeout=TIMEOUT)
    receiver = cast.receiver(targets_of(there), timeout=TIMEOUT, name="one")
    receiving = cast.threads.submit(receiver.receive)
    monkeypatch.setattr(Connection, "send", larger)
    with pytest.warns(UserWarning, match="expected 36 bytes at 0"):
        assert sender.send(1).failed.keys() == {"one"}
    assert not there["w"].any()
    monkeypatch.undo()
    assert sender.send(2).failed == {}
    assert receiving.result(TIMEOUT) == 2 and there["w"].all()


def test_the_secret_of_one_host_is_a_file_of_this_user(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with ThreadPoolExecutor() as threads:
        found = set(threads.map(secret_for, ["127.0.0.1", "localhost", "::1"] * 20))
    assert len(found) == 1 and len(found.pop()) == 32
    directory = tmp_path / f"shardkit-{os.getuid()}"
    assert [one.stat().st_mode & 0o777 for one in (directory, directory / "weights-secret")] == [0o700, 0o600]
    directory.chmod(0o755)
    with pytest.raises(PermissionError, match="is not a directory that only this user can enter"):
        secret_for("localhost")
    text = secrets.token_hex()
    monkeypatch.setenv("SHARDKIT_WEIGHTS_SECRET", text)
    assert secret_for("example.org") == text.encode()


def test_several_hosts_need_a_secret(monkeypatch):
    monkeypatch.delenv("SHARDKIT_WEIGHTS_SECRET", raising=False)
    with pytest.raises(ValueError, match="set SHARDKIT_WEIGHTS_SECRET to the same random text"):
        WeightReceiver("tcp://192.0.2.1:29600", targets_of({"w": torch.zeros(1)}))


@pytest.mark.parametrize("address", ["host:1", "tcp://host", "udp://host:1", "tcp://host:1/x"])
def test_an_address_of_another_form_is_refused(address):
    with pytest.raises(ValueError, match="expected one such as"):
        parse(address)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=r"cannot listen at 127.0.0.1:.*choose a free port"):
            WeightSender({}, address, rank=0, world_size=1)


def test_a_name_that_others_do_not_reach_is_a_warning(monkeypatch):
    """As Debian has a host's own name in /etc/hosts."""
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: real("127.0.1.1", *rest, **more))
    with pytest.warns(UserWarning, match=r"trainer0 is 127\.0\.1\.1 on this host"):
        listen("trainer0", 0).close()
