"""Messages, progress and exit status of the commands that inspect and convert checkpoints."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardkit.core.checkpoint.conversion import Converted, refuse_existing
from shardkit.core.checkpoint.errors import CheckpointError, printable
from shardkit.core.checkpoint.leaves import name_of
from shardkit.core.checkpoint.stored import Checkpoint

Progress = Callable[[int], object]
"""Receives the number of bytes done."""


_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def say(line: str) -> None:
    """Prints a line of the result to stdout."""
    sys.stdout.write(printable(line) + "\n")


def note(line: str) -> None:
    """Prints a remark to stderr."""
    sys.stderr.write(printable(line) + "\n")


def counted(count: int, noun: str) -> str:
    """The number with its noun, in the plural unless it is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def sized(nbytes: int) -> str:
    """Bytes in the largest unit, up to GiB, that makes them at least 1."""
    if nbytes < 2**10:
        return f"{nbytes} B"
    unit = next((unit for unit in ("KiB", "MiB") if nbytes < _BYTES[unit] * 1023.95), "GiB")
    return f"{nbytes / _BYTES[unit]:.1f} {unit}"


def status_of(run: Callable[[], int]) -> int:
    """The exit status of a command: its own, 2 after an error, which is printed to stderr in one line, or 141 if the
    reader of its output closes the pipe first.
    """
    status = 128 + signal.SIGPIPE  # as if the signal had ended it: cut off, it has verified nothing
    try:
        status = run()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status
    except (CheckpointError, OSError, ImportError) as error:
        note(f"error: {error}")
        return 2


def run_conversion(
    options: argparse.Namespace, checkpoint: Checkpoint, what: str, convert: Callable[[Progress], Converted]
) -> int:
    """Prints the contents of the source, converts it, and prints what was written; with --dry-run only lists it.

    Args:
        options: those of `shardkit.commands.checkpoint.add_conversion_options`, and the target.
        checkpoint: the source.
        what: the name of the format.
        convert: runs the conversion; receives a function to report its progress.
    """
    refuse_existing(options.target)
    note(
        f"{checkpoint.kind} checkpoint of {counted(checkpoint.world_size, 'rank')}: "
        f"{counted(len(checkpoint.tensors), 'tensor')}, {sized(checkpoint.nbytes)}, "
        f"{counted(len(checkpoint.objects), 'other value')}; "
        f"tensors take at most {sized(checkpoint.bound_bytes)} of memory at a time"
    )
    for text in checkpoint.notes:
        note(f"note: {text}")
    if options.dry_run:
        for path, stored in checkpoint.tensors.items():
            say(f"{name_of(path)}\t{tuple(stored.shape)}\t{stored.dtype}")
        for path in checkpoint.objects:
            say(f"{name_of(path)}\t(object)")
        note(f"would write {what} to {options.target}; nothing was written")
        return 0
    with progress(f"write {what}", 2 * checkpoint.nbytes, shown=not options.no_progress) as report:
        done = convert(report)
    resumed = f" ({done.resumed} by an earlier attempt)" if done.resumed else ""
    say(
        f"{'wrote and verified' if done.verified else 'wrote'} {counted(len(checkpoint.tensors), 'tensor')}{resumed}, "
        f"{sized(done.nbytes)}: {done.target}"
    )
    return 0


@contextmanager
def progress(what: str, total: int, *, shown: bool) -> Iterator[Progress]:
    """A progress bar by rich, if it is installed and stderr is a terminal; counts bytes up to `total`."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars
    except ImportError:
        shown = False
    if not shown:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=total)
        yield lambda nbytes: bars.advance(task, nbytes)
