"""Which hidden directories are being written now, so that whoever cleans up does not take them for a dead run's.

Writers hold a shared lock on the directory, which the system lets go of when they die. Locks hold on one host, and not
on every file system; so a directory is renamed before it is removed. It can be gone for its writer, who then fails;
never can it lose files while its writer makes it a checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["remove_unless_written", "writing_in"]


@contextlib.contextmanager
def writing_in(directory: Path) -> Iterator[None]:
    """Makes a hidden directory, and keeps `clean` of other runs away from it while the block runs. Raises OSError."""
    directory.mkdir(exist_ok=True)  # by the first of the ranks
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # network file systems may have no locks for directories
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing does not do if a forked worker has the descriptor too
        os.close(descriptor)


def remove_unless_written(path: Path, doomed: Path) -> None:
    """Removes a hidden directory that no writer has locked, under another name: who comes too late finds none of it."""
    with contextlib.suppress(FileNotFoundError):  # another run was faster
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return
            path.rename(doomed)
        finally:
            os.close(descriptor)
        shutil.rmtree(doomed)
