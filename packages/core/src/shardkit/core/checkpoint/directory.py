"""A directory of checkpoints: which are complete, what to clean up, which are kept, and which run wrote them.

    step-000100/                      a complete checkpoint: only a rename creates this name
    .step-000200.<token>.incomplete/  one that is being written, or whose run died while writing
    .step-000100.<token>.replaced/    an older one of the same step, kept until the new one is in place
    .step-000050.<token>.deleted/     one that is being deleted
    step-000100.damaged/              one that was skipped because it is damaged; nothing removes it

Each save has its own token, so leftovers of a dead run or a failed save never mix with later files. Locks show which
hidden directories are being written: writers hold a shared lock on the directory, which the system releases when they
die. Locks hold on one host, and not on every file system, so a directory is renamed before it is removed. Its writer
may then find it gone, and fails; but it never loses files while its writer turns it into a checkpoint.

In an object store a checkpoint is complete once it has a manifest, the last object of a save:

    step-000100.<token>/manifest.json           a complete checkpoint
    step-000200.<token>/ without a manifest     one that is being written or deleted, or whose run died meanwhile
    step-000100.<token>/manifest.json.damaged   one that was skipped because it is damaged; nothing removes it
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.index import MANIFEST, Index, sealed_as, unpack, unseal
from shardkit.core.checkpoint.leaves import LeftOut
from shardkit.core.checkpoint.location import Location, ObjectPath, location_of, names_in, remove_tree, sizes_of
from shardkit.core.checkpoint.stock_metadata import METADATA, read_stock
from shardkit.core.checkpoint.verified_file import open_inside, read_small


@contextlib.contextmanager
def writing_in(directory: Location) -> Iterator[None]:
    """Makes a hidden directory, and keeps `clean` of other runs from removing it during the block. Raises OSError.
    Does nothing in an object store.
    """
    if isinstance(directory, ObjectPath):
        yield
        return
    directory.mkdir(exist_ok=True)  # by the first rank to arrive
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # network file systems may have no locks for directories
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if a forked worker has the descriptor too
        os.close(descriptor)


def remove_unless_written(path: Path, doomed: Path) -> None:
    """Renames and removes a hidden directory that no writer has locked; a late writer finds nothing at its path. Of a
    linked checkpoint only the link is removed.
    """
    with contextlib.suppress(FileNotFoundError):  # another run was faster
        if path.is_symlink():
            path.unlink()
            return
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


_LOG = logging.getLogger(__name__)

_COMPLETE = re.compile(r"step-(\d{6,})")
_ASIDE = f"{MANIFEST}.damaged"
_IN_STORE = re.compile(r"step-(\d{6,})\.[0-9a-f]+")
_HIDDEN = re.compile(r"\.(step-\d{6,})\.([0-9a-f]+)\.(incomplete|replaced|deleted)")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A completed checkpoint on disk. If its files were damaged since, reading raises."""

    path: Location
    step: int

    @classmethod
    def all_in(cls, directory: str | Location) -> list[StoredCheckpoint]:
        """The complete checkpoints of a directory, oldest first. Needs no manager, and a run may be writing there.

        `directory` may be the URL of a place in an object store.
        """
        return directory_of(location_of(directory)).complete()

    def read(self) -> Index:
        """The index. Raises DamagedCheckpointError if the manifest is damaged or a file is missing or truncated."""
        index = read_manifest(self.path)
        if index.step != self.step:
            raise DamagedCheckpointError(f"{self.path / MANIFEST} is of step {index.step}: renamed, or swapped")
        return index


def read_manifest(path: Location) -> Index:
    """The index of a checkpoint. Raises DamagedCheckpointError if files are missing or not of their size."""
    index = unpack(read_small(path, MANIFEST), str(path / MANIFEST))
    expected = {file.name: file.nbytes for file in index.files.values()}
    for name, size in sizes_of(path, expected):
        if size is None:
            raise DamagedCheckpointError(f"{path / name} is missing")
        if size != expected[name]:
            raise DamagedCheckpointError(f"{path / name} has {size} bytes, {expected[name]} were written")
    return index


@dataclass
class CheckpointDirectory:
    """All checkpoints of a run. Nothing here is collective; one rank writes, any may read."""

    path: Path
    _nameless: list[Path] = field(default_factory=list, init=False, repr=False, compare=False)
    """Renamed checkpoints that still have to be deleted."""

    def final(self, step: int) -> Path:
        """The path of a step's checkpoint, whether it exists or not."""
        return self.path / f"step-{step:06d}"

    def hidden(self, step: int, token: str, state: str) -> Path:
        """The path of a checkpoint that is not complete yet, or is being replaced or deleted."""
        return self.path / f".step-{step:06d}.{token}.{state}"

    def complete(self) -> list[StoredCheckpoint]:
        """The complete checkpoints, oldest first. Raises CheckpointError if the directory cannot be read."""
        try:
            # A link leads to a checkpoint that was moved; if its disk is not there now, reading raises.
            names = [entry.name for entry in os.scandir(self.path) if entry.is_dir() or entry.is_symlink()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        found = [(int(match[1]), name) for name in names if (match := _COMPLETE.fullmatch(name))]
        return [StoredCheckpoint(self.path / name, step) for step, name in sorted(found)]

    def clean(self) -> None:
        """Removes leftovers of dead runs, if this process may, and restores half-replaced checkpoints. Raises
        CheckpointError if the directory cannot be made or read, or such a checkpoint cannot be restored.
        """
        try:
            missing = [path for path in (self.path, *self.path.parents) if not path.is_dir()]
            self.path.mkdir(parents=True, exist_ok=True)
            for made in missing:
                sync_directory(made.parent)
            for path in sorted(self.path.iterdir()):  # incomplete directories come before those they replace
                match = _HIDDEN.fullmatch(path.name)
                if not match:
                    continue
                name, token, state = match.groups()
                if state != "replaced" or os.path.lexists(self.path / name):
                    try:
                        remove_unless_written(path, path.with_name(f".{name}.{token}.deleted"))
                    except OSError as error:  # as for a reader, complete ones can still be restored
                        _LOG.warning("%s is left of a run that died, and cannot be removed: %s", path, error)
                elif not path.with_name(f".{name}.{token}.incomplete").exists():  # else a run is about to rename it
                    path.rename(self.path / name)
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {self.path}: {error.strerror or error}; check its permissions"
            ) from error

    def publish(self, temporary: Path, step: int, token: str) -> Path:
        """Makes a finished directory the checkpoint of a step: one rename, then a sync to disk."""
        final, replaced = self.final(step), self.hidden(step, token, "replaced")
        sync_directory(temporary)
        if os.path.lexists(final):  # also a link to a disk that is not there now
            final.rename(replaced)
        try:
            temporary.rename(final)
        except OSError:
            if os.path.lexists(replaced):
                replaced.rename(final)
            raise
        sync_directory(self.path)
        with _forgiven(self.path):
            if os.path.lexists(replaced):
                self._discard([replaced], [self.hidden(step, token, "deleted")])
        return final

    def set_aside(self, path: Path, reason: str, restored: Location) -> None:
        """Renames a damaged checkpoint, so that it no longer counts as the newest, and logs why, and what is used."""
        numbered = (path.with_name(f"{path.name}.damaged{number or ''}") for number in itertools.count())
        kept = path.rename(next(other for other in numbered if not os.path.lexists(other)))
        sync_directory(self.path)
        _LOG.warning("skipped a damaged checkpoint: %s; it is kept as %s, and %s was restored", reason, kept, restored)

    def retire(self, keep: int, saved: int, token: str) -> None:
        """Deletes all but the newest `keep` of the checkpoints up to step `saved`, which exists.

        The run that saved it skipped newer checkpoints, as damaged or for another reason: they do not count, and only
        the user deletes them. A failed deletion is a warning; nothing is raised.
        """
        with _forgiven(self.path):
            old = [one for one in self.complete() if one.step <= saved][:-keep]
            if old:
                self._discard(
                    [self.final(one.step) for one in old], [self.hidden(one.step, token, "deleted") for one in old]
                )

    def _discard(self, paths: Sequence[Path], doomed: Sequence[Path]) -> None:
        """Deletes checkpoints that are no longer needed; a failure does not affect the new checkpoint.

        All are renamed, and the renames synced, before any file is deleted: none can come back without its files.
        Leftovers of earlier deletions are tried again.
        """
        for path, hidden in zip(paths, doomed, strict=True):
            with _forgiven(path):
                path.rename(hidden)
                self._nameless.append(hidden)
        with _forgiven(self.path):
            sync_directory(self.path)
            for hidden in tuple(self._nameless):
                with _forgiven(hidden):
                    if hidden.is_symlink():
                        hidden.unlink()
                    elif hidden.exists():  # else another manager has removed it
                        shutil.rmtree(hidden)
                    self._nameless.remove(hidden)


@dataclass
class ObjectDirectory:
    """All checkpoints of a run in an object store; the same methods. Nothing is renamed or locked there.

    Leftovers of dead runs are deleted when this run has saved, not when it starts: they look like a save in progress,
    which a job that only reads must not remove. A run that saves is alone (`OtherRuns`).
    """

    path: ObjectPath
    _left: list[ObjectPath] = field(default_factory=list, init=False, repr=False, compare=False)
    """Leftovers of dead runs."""

    def hidden(self, step: int, token: str, state: str) -> ObjectPath:
        """The place of a checkpoint, from the first object on."""
        return self.path / f"step-{step:06d}.{token}"

    def _all(self) -> Iterator[tuple[int, ObjectPath, set[str]]]:
        """Step, place and names of objects, for everything that is or may become a checkpoint."""
        for name in names_in(self.path):
            if match := _IN_STORE.fullmatch(name):
                yield int(match[1]), self.path / name, names_in(self.path / name)

    def complete(self) -> list[StoredCheckpoint]:
        """The complete checkpoints, oldest first. Raises OSError."""
        newest: dict[int, ObjectPath] = {}
        for step, path, names in self._all():
            if MANIFEST in names and (step not in newest or _created(path) > _created(newest[step])):
                newest[step] = path
        return [StoredCheckpoint(path, step) for step, path in sorted(newest.items())]

    def clean(self) -> None:
        """Notes the leftovers of dead runs, which `publish` deletes. Raises OSError."""
        self._left.extend(path for _, path, names in self._all() if not {MANIFEST, _ASIDE} & names)

    def publish(self, temporary: ObjectPath, step: int, token: str) -> ObjectPath:
        """Deletes older checkpoints of the step, and leftovers of dead runs; the manifest has made this one."""
        with _forgiven(self.path):
            old = [path for other, path, names in self._all() if other == step and MANIFEST in names]
            self._discard([path for path in old if path != temporary] + self._left)
            self._left.clear()
        return temporary

    def set_aside(self, path: ObjectPath, reason: str, restored: Location) -> None:
        """Renames the manifest of a damaged checkpoint, and logs why, and what is used."""
        path.store.copy((path / MANIFEST).key, (path / _ASIDE).key)
        (path / MANIFEST).unlink()
        _LOG.warning("skipped a damaged checkpoint: %s; it is kept at %s, and %s was restored", reason, path, restored)

    def retire(self, keep: int, saved: int, token: str) -> None:
        """As in a directory of files."""
        with _forgiven(self.path):
            self._discard([one.path for one in self.complete() if one.step <= saved][:-keep])

    def _discard(self, paths: Sequence[Any]) -> None:
        """Deletes checkpoints, their manifests first: no checkpoint is without its other objects."""
        for path in paths:
            with _forgiven(path):
                if (path / MANIFEST).exists():
                    (path / MANIFEST).unlink()
                remove_tree(path)


class Directory(Protocol):
    """The methods of the two classes above; each takes its own kind of location."""

    path: Any

    def hidden(self, step: int, token: str, state: str) -> Any: ...
    def complete(self) -> list[StoredCheckpoint]: ...
    def clean(self) -> None: ...
    def publish(self, temporary: Any, step: int, token: str) -> Any: ...
    def set_aside(self, path: Any, reason: str, restored: Location) -> None: ...
    def retire(self, keep: int, saved: int, token: str) -> None: ...


def directory_of(location: Location) -> Directory:
    """The checkpoints at a location."""
    return CheckpointDirectory(location) if isinstance(location, Path) else ObjectDirectory(location)


def _created(path: ObjectPath) -> str:
    """When a checkpoint was completed; nothing for one whose manifest is damaged."""
    with contextlib.suppress(DamagedCheckpointError):
        return str(unseal(read_small(path, MANIFEST), str(path)).get("created", ""))
    return ""


@contextlib.contextmanager
def _forgiven(path: Location) -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointError) as error:
        _LOG.warning(
            "%s: could not delete old checkpoints (%s); a later save that removes something or the next run "
            "tries again",
            path,
            error,
        )


def sync_directory(path: Path) -> None:
    """Has the system write a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_index(path: Location, left_out: LeftOut | None = None) -> Index:
    """The index of a directory: from our manifest, or from stock's metadata if there is no manifest.

    Excludes what is left out; in stock's format those files may be missing. Raises CheckpointError if it is not a
    checkpoint, DamagedCheckpointError if it is a damaged one.
    """
    left_out = left_out or LeftOut()
    if (path / MANIFEST).exists():
        return read_manifest(path).without(left_out)
    if (path / METADATA).exists():
        return read_stock(path, left_out)
    _check_exists(path)
    raise CheckpointError(
        f"{path} is not a checkpoint: it has neither {MANIFEST} nor {METADATA}; choose another directory"
    )


def _check_exists(path: Location) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; choose another directory")


def candidates(path: Location, *, older: bool) -> list[tuple[Location, Callable[[], Index]]]:
    """The checkpoints that `path` can mean, newest first, each with a function that returns its index.

    A checkpoint and, with `older` and if a run saved it, the run's earlier ones; for a directory of a run, all complete
    ones. Without `older`, the neighbours of a checkpoint are not looked at and need not be readable. Any of them may be
    damaged: the functions raise as `open_index` and `StoredCheckpoint.read` do. Raises CheckpointError if there is
    none.
    """
    if any((path / name).exists() for name in (MANIFEST, METADATA)):
        beside = StoredCheckpoint.all_in(path.absolute().parent) if older else []
        steps = [one.step for one in beside if one.path == path.absolute()]
        before = [one for one in beside if steps and one.step < steps[0]]
        return [(path, partial(open_index, path)), *((one.path, one.read) for one in reversed(before))]
    found = StoredCheckpoint.all_in(path)
    if not found:
        _check_exists(path)
        raise CheckpointError(f"{path} is not a checkpoint, and contains none; choose another directory")
    return [(one.path, one.read) for one in reversed(found)]


class OtherRuns:
    """The complete checkpoints of a directory that one run knows. Raises CheckpointError as `complete` does."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        seals, self._unread = self._there()
        self._known = set(seals.values())

    def _there(self) -> tuple[dict[str, str], set[str]]:
        """Seals of the existing checkpoints, by name, and names that cannot be read now; damaged ones have none."""
        seals: dict[str, str] = {}
        unread: set[str] = set()
        for one in self._directory.complete():
            try:
                if (seal := _seal_of(one.path)) is not None:
                    seals[one.path.name] = seal
            except (OSError, CheckpointError):  # for example, a server that is briefly unavailable
                unread.add(one.path.name)
        return seals, unread

    def make_way(self, manifest: bytes) -> None:
        """Call before this run writes the manifest of a checkpoint. Raises CheckpointError if the directory has a
        checkpoint that this run neither found at its start nor saved.
        """
        seals, _ = self._there()
        self._known |= {seals[name] for name in self._unread & seals.keys()}  # found at its start, readable again
        self._unread -= seals.keys()
        if others := [name for name, seal in seals.items() if seal not in self._known]:
            raise CheckpointError(
                f"{self._directory.path} gained {', '.join(others[:5])}{' ...' if len(others) > 5 else ''} since this "
                "run began, and this run has not saved it: another run saves to the same directory. Give each run a "
                "directory of its own; if the other one has ended, start this one again, and it goes on from there"
            )
        seal = sealed_as(manifest)
        assert seal is not None
        self._known.add(seal)


def _seal_of(path: Location) -> str | None:
    """None if the manifest is damaged or missing. Raises OSError or CheckpointError if it is unreadable."""
    try:
        with open_inside(path, MANIFEST) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200))
            return sealed_as(file.read())
    except DamagedCheckpointError:  # or removed since it was listed
        return None
