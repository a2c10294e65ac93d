"""Observers of a program, started by the environment, so that no script has to change.

An installed distribution offers an observer as an entry point of the group `shardkit.observers`: a function without
arguments, which subscribes to events. One named `watch` is called in every process whose environment has
`SHARDKIT_WATCH` set (and not to 0), at the first `fully_shard` call.
"""

from __future__ import annotations

import functools
import os
import warnings
from importlib.metadata import entry_points

from shardkit.core.logs import start_logs

__all__ = ["start_observers"]

_GROUP = "shardkit.observers"
_PREFIX = "SHARDKIT_"
# Names whose variables are only set to request an observer: a missing one must not go unnoticed.
_EXPECTED = ("profile", "watch")
_started: set[tuple[str, str]] = set()


@functools.cache
def start_observers() -> None:
    """Starts the observers and logs that the environment requests, each once in a process.

    Raises:
        Any exception of an observer, for example for a setting that it cannot read. The next call tries it again.
    """
    wanted = {name for name in _EXPECTED if _asked_for(name)}
    if not wanted and not any(name.startswith(_PREFIX) for name in os.environ):
        return
    start_logs()
    for entry in entry_points(group=_GROUP):
        if _asked_for(entry.name):
            wanted.discard(entry.name)
            if (entry.name, entry.value) not in _started:
                entry.load()()
                _started.add((entry.name, entry.value))
    for name in sorted(wanted):
        warnings.warn(
            f"{_PREFIX}{name.upper()} is set, but no installed package has the entry point '{name}' in group "
            f"{_GROUP}; install the package or unset the variable",
            stacklevel=3,
        )


def _asked_for(name: str) -> bool:
    return os.environ.get(_PREFIX + name.upper(), "0") not in ("", "0")
