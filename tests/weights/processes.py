"""Senders and receivers in processes of their own that share nothing with each other, and that may be killed."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from typing import Any

from shardkit.weights import WeightReceiver, WeightSender
from shardkit.weights.wire import Connection
from tests.support.pool import start_server
from tests.support.rank_process import end_with_the_server

TIMEOUT = 60.0  # seconds, which only a hang reaches


def free_address() -> str:
    """An address of this host whose port was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{sock.getsockname()[1]}"


class Other:
    """A process that runs `body(pipe, *args)`, forked from the server of the rank pools.

    Args:
        body: a function of a module.
        args: what it gets besides its end of the pipe.
        shared: whether it may use shared memory.
        stop_at: at which message that it sends, counted from 1, it gets `stop_by` instead of sending it; 0: never.
        stop_by: a signal.
    """

    def __init__(
        self,
        body: Callable[..., None],
        *args: Any,
        shared: bool = True,
        stop_at: int = 0,
        stop_by: int = signal.SIGKILL,
    ) -> None:
        start_server()
        self.pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        place = (sys.path, shared, stop_at, stop_by)
        self.process = context.Process(target=_run, args=(there, place, body, args))
        self.process.start()
        there.close()

    def says(self) -> Any:
        """The next value that the process sends. Raises EOFError if it has ended."""
        if not self.pipe.poll(TIMEOUT):
            raise TimeoutError("the process has sent nothing")
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> "Other":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Cast(contextlib.ExitStack):
    """The senders, receivers, threads and other processes of a test, which end with it."""

    def __init__(self) -> None:
        super().__init__()
        self.address = free_address()
        self.threads = self.enter_context(ThreadPoolExecutor())

    def sender(self, values: Any, **options: Any) -> WeightSender:
        return self.enter_context(WeightSender(values, self.address, **options))

    def receiver(self, targets: Any, **options: Any) -> WeightReceiver:
        return self.enter_context(WeightReceiver(self.address, targets, **options))

    def other(self, body: Callable[..., None], *args: Any, **options: Any) -> Other:
        """One that runs `body(pipe, address, *args)`."""
        return self.enter_context(Other(body, self.address, *args, **options))


def _run(pipe: Pipe, place: tuple[list[str], bool, int, int], body: Callable[..., None], args: tuple[Any, ...]) -> None:
    end_with_the_server()
    sys.path[:], shared, stop_at, stop_by = place
    os.environ["SHARDKIT_SHARED_MEMORY"] = "1" if shared else "0"
    if stop_at:
        _stop_at(stop_at, stop_by)
    body(pipe, *args)


def _stop_at(number: int, by: int) -> None:
    send, count = Connection.send, 0

    async def counted(self: Connection, message: dict[str, Any], data: memoryview | None = None) -> None:
        nonlocal count
        count += message.get("op") != "beat"
        if count == number and data is not None:  # in the middle of a bucket
            await send(self, message, None)
            await self._loop.sock_sendall(self._socket, data[: len(data) // 2])
        if count == number:
            os.kill(os.getpid(), by)
            time.sleep(TIMEOUT)  # noqa: ASYNC251 - another thread may be the one that takes the signal
        await send(self, message, data)

    Connection.send = counted
