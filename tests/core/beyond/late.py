"""Jobs of overlapped steps that run when somebody waits for them: whoever does not wait reads old values."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from shardkit.core.beyond import steps


class Late:
    """A job that runs when it is waited for."""

    def __init__(self, run: Callable[..., None], *args: Any) -> None:
        self._work: Any = run, args
        self._error: Exception | None = None

    def exception(self) -> Exception | None:
        if self._work is not None:
            (run, args), self._work = self._work, None
            try:
                run(*args)
            except Exception as error:  # noqa: BLE001 - as a thread does
                self._error = error
        return self._error


@contextlib.contextmanager
def late() -> Iterator[None]:
    """All jobs run late."""
    with mock.patch.object(steps, "_worker", return_value=SimpleNamespace(submit=Late)):
        yield
