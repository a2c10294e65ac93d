"""Two runs that save to one directory would take each other's checkpoints for their own: they are told apart here.

A run knows the checkpoints that were there when it began, and those that it has made. One more than these is another
run's, or was put there by hand. They are told apart by the seals of their manifests, which also hold the time: inodes
are not the same for ever on every file system, and a run would end for nothing. Nothing is written for this and nothing
is locked, so nothing is left that could keep a run from starting again, and it holds on any file system that shows new
directories.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardkit.core.checkpoint.directory import CheckpointDirectory
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.manifest import MANIFEST, sealed_as
from shardkit.core.checkpoint.verified_file import open_inside

__all__ = ["OtherRuns"]


class OtherRuns:
    """What one run knows of the complete checkpoints of a directory. Raises CheckpointError as `complete` does."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self._directory = directory
        self._known = {seal for seal, _ in self._there()}

    def _there(self) -> list[tuple[str, str]]:
        """Seal and name of what is there. What has lost its seal, as damage, is nobody's."""
        found = [(_seal_of(one.path), one.path.name) for one in self._directory.complete()]
        return [(seal, name) for seal, name in found if seal is not None]

    def make_way(self, temporary: Path) -> None:
        """This run is about to give a directory, which has its manifest, the name of a checkpoint.

        Raises:
            CheckpointError: if there is a checkpoint that this run has neither found at its start nor made.
        """
        if others := [name for seal, name in self._there() if seal not in self._known]:
            raise CheckpointError(
                f"{self._directory.path} has got {', '.join(others[:5])}{' ...' if len(others) > 5 else ''} since this "
                "run began, and this run has not saved it: another run saves to the same directory. Give each run a "
                "directory of its own; if the other one has ended, start this one again, and it goes on from there"
            )
        seal = _seal_of(temporary)
        assert seal is not None, "the manifest has been written"
        self._known.add(seal)


def _seal_of(path: Path) -> str | None:
    try:
        with os.fdopen(open_inside(path, MANIFEST), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200))
            return sealed_as(file.read())
    except (OSError, CheckpointError):  # damaged, or removed since it was listed
        return None
