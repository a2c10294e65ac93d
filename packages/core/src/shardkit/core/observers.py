"""Observers and logs of a program, started by the environment, so that no script has to change.

An observer is a function without arguments that subscribes to events, in an entry point of the group
`shardkit.observers`. Those of shardkit-tools, `profile` and `watch`, are called at the first `fully_shard` in every
process whose environment has `SHARDKIT_PROFILE` or `SHARDKIT_WATCH` set (and not to 0).

SHARDKIT_LOGS says which of shardkit's loggers write to stderr, with the rank in each line. It has the form of torch's
TORCH_LOGS: names under `shardkit`, joined by commas, each for the loggers below it; `+name` shows debug messages as
well, `-name` errors only; "all" is the name of all.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from importlib.metadata import entry_points

import torch.distributed as dist

_GROUP = "shardkit.observers"
_NAMES = ("profile", "watch")

_LOGS = "SHARDKIT_LOGS"
_PARTS = ("core.engine", "core.checkpoint")


@functools.cache
def start_observers() -> None:
    """Starts the observers and logs that the environment requests, once in a process."""
    if not any(name.startswith("SHARDKIT_") for name in os.environ):
        return
    start_logs()
    for name in _NAMES:
        variable = f"SHARDKIT_{name.upper()}"
        if os.environ.get(variable, "0") in ("", "0"):
            continue
        for entry in entry_points(group=_GROUP, name=name):
            entry.load()()
            break
        else:
            warnings.warn(
                f"{variable} is set, but no installed package has the entry point '{name}' in group {_GROUP}; install "
                "the package or unset the variable",
                stacklevel=3,
            )


@functools.cache
def start_logs() -> None:
    """Configures the loggers that the environment names, once in a process."""
    wanted = [word.strip() for word in os.environ.get(_LOGS, "").split(",") if word.strip()]
    if not wanted:
        return
    levels: dict[str, int] = {}
    for word in wanted:
        name = word.lstrip("+-")
        if name not in ("all", *_PARTS):
            raise ValueError(f"{_LOGS} has {word!r}; use all, {' or '.join(_PARTS)}")
        logger = "shardkit" if name == "all" else f"shardkit.{name}"
        levels[logger] = {"+": logging.DEBUG, "-": logging.ERROR}.get(word[0], logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname).1s %(asctime)s rank %(rank)s %(name)s: %(message)s"))
    handler.addFilter(_with_rank)
    top = logging.getLogger("shardkit")
    top.addHandler(handler)
    top.propagate = False  # the program's own handlers would write each line once more
    for logger, level in levels.items():
        logging.getLogger(logger).setLevel(level)


def _with_rank(record: logging.LogRecord) -> bool:
    record.rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "?")
    return True
