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
_PARTS = ("core", "core.engine", "core.checkpoint", "weights", "tp_adapter", "legacy_fsdp_compat", "tools")


@functools.cache
def start_logs() -> None:
    """Configures the loggers that the environment names, once in a process.

    Raises:
        ValueError: for a name that is none of theirs.
    """
    wanted = [word.strip() for word in os.environ.get(_VARIABLE, "").split(",") if word.strip()]
    if not wanted:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname).1s %(asctime)s rank %(rank)s %(name)s: %(message)s"))
    handler.addFilter(_with_rank)
    logging.getLogger("shardkit").addHandler(handler)
    for word in wanted:
        level = {"+": logging.DEBUG, "-": logging.ERROR}.get(word[0], logging.INFO)
        name = word.lstrip("+-")
        if name not in ("all", *_PARTS):
            raise ValueError(f"{_VARIABLE} has {word!r}; use all, or one of {', '.join(_PARTS)}")
        logging.getLogger("shardkit" if name == "all" else f"shardkit.{name}").setLevel(level)


def _with_rank(record: logging.LogRecord) -> bool:
    record.rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "?")
    return True
