"""`shardkit run`: starts a training command whose processes use shardkit in place of torch's FSDP."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from shardkit.autoinstall import _RECORDS, FSDP1, FSDP2, NAMES_GROUP, NEEDS_FSDP1, VARIABLE


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m shardkit.core run`; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m shardkit.core run",
        description="Runs a training script or a launcher with shardkit in place of torch's own FSDP.",
        epilog="example: python -m shardkit.core run torchrun --nproc-per-node 2 train.py",
    )
    parser.add_argument("--fsdp1", action="store_true", help="replace FullyShardedDataParallel and its names as well")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if no sharded model ran on shardkit")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script.py ARGUMENTS, or torchrun, accelerate, ...")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("a command is missing, such as: torchrun --nproc-per-node 2 train.py")
    return run(command, fsdp1=options.fsdp1, strict=options.strict)


def run(
    command: Sequence[str],
    *,
    fsdp1: bool = False,
    strict: bool = False,
    name: str = "run",
    variables: Mapping[str, str] | None = None,
) -> int:
    """Runs the command, and warns if no process on this host has run a sharded model.

    Args:
        command: a script.py with its arguments, or a launcher.
        fsdp1: whether to replace FSDP1's names as well.
        strict: whether that warning is an error.
        name: the name of the shardkit command that runs it, for messages.
        variables: environment variables to set as well.

    Returns:
        The exit status of the command: 128 + the signal if one ended it, 127 if it cannot be started; 2 with `fsdp1` if
        the package with FSDP1's names is not installed; with `strict` 1 instead of 0 if no sharded model ran.
    """
    if fsdp1 and not entry_points(group=NAMES_GROUP, name="fsdp1"):
        sys.stderr.write(f"shardkit {name}: --fsdp1 {NEEDS_FSDP1}\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="shardkit-run-") as records:
        installing = {VARIABLE: FSDP1 if fsdp1 else FSDP2, _RECORDS: records}
        status = run_command(command, {**os.environ, **(variables or {}), **installing}, name)
        if status == _NOT_RUN or any(Path(records).iterdir()):
            return status
    names = "fully_shard or FullyShardedDataParallel" if fsdp1 else "fully_shard"
    hint = "" if fsdp1 else "; a script with FullyShardedDataParallel needs --fsdp1"
    sys.stderr.write(
        f"shardkit {name}: {'error' if strict else 'warning'}: no model ran on shardkit's engine on this host: the "
        f"command did not call {names}, or started a Python in which shardkit-core is not installed, or started it "
        f"with -S or without {VARIABLE}{hint}\n"
    )
    return status or int(strict)


def _with_interpreter(command: Sequence[str]) -> list[str]:
    """Runs a script by this interpreter; looks for a launcher that is not on PATH beside it."""
    first = command[0]
    if first.endswith(".py"):
        return [sys.executable, *command]
    if shutil.which(first) is None and (beside := shutil.which(first, path=str(Path(sys.executable).parent))):
        return [beside, *command[1:]]
    return list(command)


# The status that shells return for a command that cannot be started.
_NOT_RUN = 127


def run_command(command: Sequence[str], environment: Mapping[str, str], name: str) -> int:
    """Runs a training command for `shardkit <name>` in the foreground; a script.py is run by this interpreter.

    Ctrl-C also reaches the command, which then ends its ranks; this waits for it. SIGTERM is passed on.

    Returns:
        Its exit status: 128 + the signal if one ended it, 127 if it cannot be started, with a message.
    """
    try:
        process = subprocess.Popen(_with_interpreter(command), env=dict(environment))
    except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
        reason = error.strerror if isinstance(error, OSError) else error
        shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in command[0])
        sys.stderr.write(f"shardkit {name}: {shown} cannot be run: {reason}\n")
        return _NOT_RUN
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        status = _outcome(process)
    finally:
        signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else 128 - status


def _outcome(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue
