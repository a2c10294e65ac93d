"""SHARDKIT_LOGS: which of shardkit's loggers write to stderr, with the rank in each line.

Loggers have the names of modules, such as `shardkit.core.engine.root`, and a program may configure them itself. The
variable has the form of torch's TORCH_LOGS: names under `shardkit`, joined by commas, each for the loggers below it;
`+name` shows debug messages as well, `-name` errors only; "all" is the name of all.
"""

from __future__ import annotations

import functools
import logging
import os

import torch.distributed as dist

__all__ = ["start_logs"]

_VARIABLE = "SHARDKIT_LOGS"
_PARTS = ("core.engine", "core.checkpoint")


@functools.cache
def start_logs() -> None:
    """Configures the loggers that the environment names, once in a process.

    Raises:
        ValueError: for a name that is none of theirs.
    """
    wanted = [word.strip() for word in os.environ.get(_VARIABLE, "").split(",") if word.strip()]
    if not wanted:
        return
    levels: dict[str, int] = {}
    for word in wanted:
        name = word.lstrip("+-")
        if name not in ("all", *_PARTS):
            raise ValueError(f"{_VARIABLE} has {word!r}; use all, {' or '.join(_PARTS)}")
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
