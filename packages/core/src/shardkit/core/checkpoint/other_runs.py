"""Two runs that save to one directory would take each other's checkpoints for their own: they are told apart here.

A run knows the checkpoints that were there when it began, and those that it has made. One more than these is another
run's, or was put there by hand. Nothing is written for this and nothing is locked, so nothing is left that could keep a
run from starting again, and it holds on any file system that shows new directories.
"""

from __future__ import annotations

from pathlib import Path

from shardkit.core.checkpoint.directory import CheckpointDirectory
from shardkit.core.checkpoint.errors import CheckpointError

__all__ = ["OtherRuns"]

_Identity = tuple[str, int]


class OtherRuns:
    """What one run knows of the complete checkpoints of a directory. Raises CheckpointError as `complete` does."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self._directory = directory
        self._known = self._there()

    def _there(self) -> set[_Identity]:
        return {found for one in self._directory.complete() if (found := _identity(one.path)) is not None}

    def make_way(self, temporary: Path, final: Path) -> None:
        """This run is about to rename a directory to a checkpoint.

        Raises:
            CheckpointError: if there is a checkpoint that this run has neither found at its start nor made.
        """
        there = self._there()
        # What is gone is forgotten: its inode may come back as another run's.
        self._known &= there
        if others := sorted(name for name, _ in there - self._known):
            raise CheckpointError(
                f"{self._directory.path} has got {', '.join(others[:5])}{' ...' if len(others) > 5 else ''} since this "
                "run began, and this run has not saved it: another run saves to the same directory. Give each run a "
                "directory of its own; if the other one has ended, start this one again, and it goes on from there"
            )
        self._known.add((final.name, temporary.stat().st_ino))


def _identity(path: Path) -> _Identity | None:
    try:
        return path.name, path.stat().st_ino
    except FileNotFoundError:  # removed since it was listed
        return None
