"""Connections between processes that know a secret, and the thread in which they are served.

Note [Strangers]
A port of a host can be reached by every user of it, and of the network. Each end of a connection therefore proves that
it knows a secret, by a keyed digest of random numbers of both, before it is told or asked anything; the secret itself
is never sent. A caller that proves nothing within some seconds is disconnected. Sizes are checked against a limit, or
the plan, before memory is taken. Nothing is encrypted or signed: who can change packets can change weights. Between
CPUs torch's process groups are not used, because gloo's ports let everybody send who reaches them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import stat
import tempfile
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

Message = dict[str, Any]
_T = TypeVar("_T")

_BEAT = 2.0  # seconds between two signs of life
_GREETING = b"shardkit weights 1\n"
_NONCE = _PROOF = 32  # bytes
_PROVE_WITHIN = 5.0  # seconds
RETRY = 0.1  # seconds
_UNPROVEN = 128  # callers at a time
_LONGEST_MESSAGE = 256 << 20  # bytes; a description of 10,000 tensors takes about one of these 256
_SECRET_VARIABLE = "SHARDKIT_WEIGHTS_SECRET"


def parse(address: str) -> tuple[str, int]:
    """Host and port of "tcp://host:port"."""
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port or parts.path:
        raise ValueError(f"address {address!r}, expected one such as 'tcp://host:29600'")
    return parts.hostname, parts.port


def secret_for(host: str) -> bytes:
    """The secret that all peers share: that of the environment, or, on this host, one in a file of this user only."""
    if text := os.environ.get(_SECRET_VARIABLE):
        return text.encode()
    if not _is_local(host):
        raise ValueError(
            f"senders and receivers on several hosts need a secret, so that strangers cannot send weights to {host}; "
            f"set {_SECRET_VARIABLE} to the same random text, such as that of `openssl rand -hex 16`, for all of them"
        )
    directory = Path(tempfile.gettempdir(), f"shardkit-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{directory} is not a directory that only this user can enter; remove it, or set {_SECRET_VARIABLE}"
        )
    path = directory / "weights-secret"
    if not path.exists():
        own = directory / secrets.token_hex(8)
        own.touch(mode=0o600)
        own.write_text(secrets.token_hex(16))
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # whole or not at all: another process may do the same
        own.unlink()
    return path.read_bytes()


class Connection:
    """A connection to a peer that has proved itself. All methods run in the loop of an `IOThread`.

    A transfer that is cancelled or fails has left a part of a message behind: close the connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self.patience: float | None = None  # seconds in which the next bytes must come
        self.link: Any = None  # from GPU to GPU; it ends with this
        self._tasks: list[asyncio.Task[None]] = []  # that end with this

    async def send(self, message: Message, data: memoryview | None = None) -> None:
        """Sends a message, and data right after it. Raises OSError if the peer has ended."""
        text = json.dumps(message, separators=(",", ":")).encode()
        if len(text) > _LONGEST_MESSAGE:
            raise ValueError(
                f"a description of {len(text)} bytes, at most {_LONGEST_MESSAGE} are accepted; split the model between "
                "several senders, by names="
            )
        async with self._sending:
            await self._loop.sock_sendall(self._socket, len(text).to_bytes(4, "big") + text)
            if data is not None:
                await self._loop.sock_sendall(self._socket, data)

    async def receive(self) -> Message:
        """The next message. Raises ConnectionError if the peer has ended, or sends something else."""
        length = int.from_bytes(await self._exactly(4), "big")
        if length > _LONGEST_MESSAGE:
            raise ConnectionError(f"a message of {length} bytes, expected at most {_LONGEST_MESSAGE}")
        try:
            message = json.loads(await self._exactly(length))
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ConnectionError("a message that is not JSON; install the same version of shardkit on both sides")
        return message

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task that is cancelled when this is closed."""
        self._tasks.append(self._loop.create_task(work))

    async def beat(self, when: Callable[[], bool] = lambda: True) -> None:
        """Shows the peer, when it waits for that, that this process lives; the peer uses `hear`."""
        with contextlib.suppress(OSError):
            while True:
                await asyncio.sleep(_BEAT)
                if when():
                    await self.send({"op": "beat"})

    async def hear(self, patience: float) -> Message:
        """The next message that is more than a sign of life. Raises as `receive`, and TimeoutError without one for
        `patience` seconds: the peer is stopped, or its host is gone.
        """
        while True:
            try:
                async with asyncio.timeout(patience + 2 * _BEAT):
                    message = await self.receive()
            except TimeoutError:
                raise TimeoutError(f"no sign of life for {patience + 2 * _BEAT:g} s; read its log") from None
            if message.get("op") != "beat":
                return message

    async def receive_into(self, data: memoryview) -> None:
        """Fills `data`. Raises ConnectionError, or TimeoutError if nothing comes for `patience`."""
        while data:
            try:
                async with asyncio.timeout(self.patience):
                    count = await self._loop.sock_recv_into(self._socket, data)
            except TimeoutError:
                raise TimeoutError(f"nothing has come for {self.patience:g} s; read its log") from None
            if not count:
                raise ConnectionError("the peer has closed the connection; read its log")
            data = data[count:]

    async def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        await self.receive_into(memoryview(data))
        return bytes(data)

    async def prove(self, secret: bytes, *, caller: bool) -> None:
        """Proves to the peer that this process knows the secret, and has it prove the same; see Note [Strangers]."""
        nonce = secrets.token_bytes(_NONCE)
        if caller:
            if await self._exactly(len(_GREETING)) != _GREETING:
                raise ConnectionError("the process at this port is another program; choose another port")
            both = await self._exactly(_NONCE) + nonce
        else:
            await self._loop.sock_sendall(self._socket, _GREETING + nonce)
            both = nonce + await self._exactly(_NONCE)
        sides = b"caller", b"called"
        caller_proof, called_proof = (hmac.digest(secret, side + both, "sha256") for side in sides)
        if caller:
            await self._loop.sock_sendall(self._socket, nonce + caller_proof)
        theirs = b""
        with contextlib.suppress(ConnectionError):  # a peer with another secret ends the connection
            theirs = await self._exactly(_PROOF)
        proved = hmac.compare_digest(theirs, called_proof if caller else caller_proof)
        if proved and not caller:
            await self._loop.sock_sendall(self._socket, called_proof)
        if not proved:
            raise ConnectionError(f"the peer does not know the same secret; set {_SECRET_VARIABLE} alike for all peers")

    @property
    def hosts(self) -> tuple[str, str]:
        """The addresses of this host that the peer reaches, and of the peer."""
        return str(self._socket.getsockname()[0]), str(self._socket.getpeername()[0])

    def close(self) -> None:
        """Closes the connection; transfers that wait in it fail."""
        for task in self._tasks:
            task.cancel()
        if self.link is not None:
            self.link.close()
        # Only shutdown wakes a transfer that waits: the loop would forget a descriptor that is closed.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._loop.call_soon(self._socket.close)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this host; port 0 takes a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.create_server(address, family=family, backlog=4096)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # those of callers have it then too
    except OSError as error:
        raise OSError(f"cannot listen at {host}:{port}; choose a free port of this host: {error}") from error
    if ipaddress.ip_address(address[0]).is_loopback and not _is_local(host):
        warnings.warn(
            f"{host} is {address[0]} on this host, where processes of other hosts do not reach it; if there are any, "
            "give its address in the network in place of its name",
            stacklevel=3,
        )
    sock.setblocking(False)
    return sock


def _is_local(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


async def serve(listener: socket.socket, secret: bytes, peer: Callable[[Connection], Awaitable[None]]) -> None:
    """Runs `peer` for each caller that proves itself, until cancelled."""
    loop = asyncio.get_running_loop()
    unproven: dict[Connection, None] = {}  # the oldest first

    async def admit(connection: Connection) -> None:
        try:
            async with asyncio.timeout(_PROVE_WITHIN):
                await connection.prove(secret, caller=False)
            unproven.pop(connection, None)
            await peer(connection)
        except (OSError, KeyError, TypeError, ValueError):
            pass  # a stranger, or a peer that has ended or is of another version
        except Exception as error:  # noqa: BLE001 - goes to the log of this process
            loop.call_exception_handler({"message": "a peer cannot be served any more", "exception": error})
        finally:
            unproven.pop(connection, None)
            connection.close()

    with listener:
        async with asyncio.TaskGroup() as callers:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError:  # no descriptor is free, or the caller has gone
                    await asyncio.sleep(RETRY)
                    continue
                connection = Connection(sock)
                unproven[connection] = None
                callers.create_task(admit(connection))
                if len(unproven) > _UNPROVEN:
                    next(iter(unproven)).close()  # most likely a stranger: a peer proves itself at once


async def call(host: str, port: int, secret: bytes) -> Connection:
    """A connection to the process that listens there. Raises OSError after some seconds at most."""
    sock = await asyncio.to_thread(socket.create_connection, (host, port), _PROVE_WITHIN)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(sock)
    try:
        async with asyncio.timeout(_PROVE_WITHIN):
            await connection.prove(secret, caller=True)
    except BaseException:
        connection.close()
        raise
    return connection


class News:
    """Wakes those that wait for a condition to hold."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool], within: float | None = None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not condition():
                    await self._event.wait()


class IOThread:
    """A thread with an event loop, so that it does not matter what the caller's thread does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._spawned: set[Future[None]] = set()
        self._thread = threading.Thread(target=self.loop.run_forever, name="shardkit weights", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine in the loop; the caller waits for its result. An interrupt of the caller cancels it."""
        if self.loop.is_closed():
            work.close()
            raise RuntimeError("this sender or receiver has been closed; make another")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task that runs until it ends or the thread is closed."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._spawned.add(future)
        future.add_done_callback(self._spawned.discard)

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Cancels all tasks, calls `last` in the loop, and ends the thread."""
        if not self._thread.is_alive():
            return

        async def cancel() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            last()

        self.run(cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
