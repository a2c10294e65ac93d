"""The events of a block of code, for tests that look at what happened and in which order."""

import contextlib
from collections.abc import Iterator
from typing import Any

from shardkit.core import events


@contextlib.contextmanager
def heard(*kinds: type[events.Event]) -> Iterator[list[Any]]:
    """The events inside, in order; only those of `kinds`, if any are given."""
    found: list[Any] = []

    def hear(event: events.Event) -> None:
        if not kinds or isinstance(event, kinds):
            found.append(event)

    with events.subscribe(hear):
        yield found
