"""Two runs that save to one directory would take each other's checkpoints for their own: they are told apart here.

A run knows the checkpoints that were there when it began, and those that it has made. One more than these is another
run's, or was put there by hand. They are told apart by the seals of their manifests, which also hold the time: inodes
are not the same for ever on every file system, and a run would end for nothing. One whose manifest cannot be read when
the run begins is known by its name until it can be. Nothing is written for this and nothing is locked, so nothing is
left that could keep a run from starting again, and it holds on any file system that shows new directories.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardkit.core.checkpoint.directory import CheckpointDirectory
from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.manifest import MANIFEST, sealed_as
from shardkit.core.checkpoint.verified_file import open_inside

__all__ = ["OtherRuns"]


class OtherRuns:
    """What one run knows of the complete checkpoints of a directory. Raises CheckpointError as `complete` does."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self._directory = directory
        seals, self._unread = self._there()
        self._known = set(seals.values())

    def _there(self) -> tuple[dict[str, str], set[str]]:
        """Seals of what is there, by name, and what cannot be read now. What has lost its seal is nobody's."""
        seals: dict[str, str] = {}
        unread: set[str] = set()
        for one in self._directory.complete():
            try:
                if (seal := _seal_of(one.path)) is not None:
                    seals[one.path.name] = seal
            except (OSError, CheckpointError):  # as of a server that is away for a moment
                unread.add(one.path.name)
        return seals, unread

    def make_way(self, temporary: Path) -> None:
        """This run is about to give a directory, which has its manifest, the name of a checkpoint.

        Raises:
            CheckpointError: if there is a checkpoint that this run has neither found at its start nor made.
        """
        seals, _ = self._there()
        self._known |= {seals[name] for name in self._unread & seals.keys()}  # found at its start, readable again
        self._unread -= seals.keys()
        if others := [name for name, seal in seals.items() if seal not in self._known]:
            raise CheckpointError(
                f"{self._directory.path} has got {', '.join(others[:5])}{' ...' if len(others) > 5 else ''} since this "
                "run began, and this run has not saved it: another run saves to the same directory. Give each run a "
                "directory of its own; if the other one has ended, start this one again, and it goes on from there"
            )
        seal = _seal_of(temporary)
        assert seal is not None, "the manifest has been written"
        self._known.add(seal)


def _seal_of(path: Path) -> str | None:
    """None if the manifest is damaged or missing. Raises OSError or CheckpointError if it cannot be read."""
    try:
        with os.fdopen(open_inside(path, MANIFEST), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200))
            return sealed_as(file.read())
    except DamagedCheckpointError:  # or removed since it was listed
        return None
