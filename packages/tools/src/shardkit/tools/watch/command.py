"""shardkit watch: runs a training command, and says who is missing when a collective waits too long."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from rich.console import Console

from shardkit.tools.command import run_command
from shardkit.tools.watch.watcher import DEFAULT_SECONDS, SECONDS, SWITCH, parse_seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns that of the training command, 2 for bad options, 127 if it cannot be started."""
    options = _parser().parse_args(arguments)
    errors = Console(stderr=True)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        seconds = parse_seconds(options.seconds)
        if not command:
            raise ValueError("no command was given; write it behind the options: shardkit watch torchrun ... train.py")
    except ValueError as error:
        errors.print(f"error: {error}", markup=False)
        return 2
    return run_command(command, os.environ | {SWITCH: "1", SECONDS: str(seconds)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardkit watch",
        description="Runs a training command. When a collective of shardkit waits longer than the limit, or fails, "
        "every rank that can be reached reports where it is, and one of them writes who is missing to its stderr.",
        epilog="example: shardkit watch --seconds 30 torchrun --nproc-per-node 2 train.py",
    )
    parser.add_argument(
        "--seconds", default=str(DEFAULT_SECONDS), help="how long a wait may take (default: %(default)s)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    return parser
