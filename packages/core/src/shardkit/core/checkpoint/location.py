"""Where checkpoints are: in a directory, or in an object store that fsspec opens.

An object store has no directories, locks and renames: an object appears when all of it is written. `ObjectPath` has
those operations of `Path` that checkpoints need, and the functions here work on both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from shardkit.core.checkpoint.errors import CheckpointError

# Blocks of 1 MiB are read one after the other; a request for each would take most of the time.
_READ_AHEAD_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ObjectPath:
    """An object, or all objects below a prefix."""

    key: str
    store: Any = field(repr=False, compare=False)
    """The file system of fsspec."""

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.key.rstrip('/')}/{name}", self.store)

    def __str__(self) -> str:
        return str(self.store.unstrip_protocol(self.key))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.key.rpartition("/")[0], self.store)

    def absolute(self) -> ObjectPath:
        return self

    def exists(self) -> bool:
        with self._asked():
            return bool(self.store.exists(self.key))

    def unlink(self) -> None:
        self.store.rm_file(self.key)

    def sizes(self) -> dict[str, int | None]:
        """Bytes of each object below, None for a prefix with more objects below it. Empty if there is nothing."""
        found: list[dict[str, Any]] = []
        with self._asked(), contextlib.suppress(FileNotFoundError):
            found = self.store.ls(self.key, detail=True)
        names = [(one["name"].rstrip("/").rpartition("/")[2], one) for one in found]
        return {name: one["size"] if one["type"] == "file" else None for name, one in names}

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Names the place in an error, which the libraries of the stores raise as they like."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"{self} cannot be read: {error or type(error).__name__}; check the URL, and the settings and the "
                "credentials of the store"
            ) from error


Location: TypeAlias = Path | ObjectPath


def location_of(place: str | os.PathLike[str] | Location) -> Location:
    """The location that a path or a URL means; `file://` is a directory. Raises CheckpointError for a URL whose store
    cannot be opened.
    """
    if isinstance(place, ObjectPath):
        return place
    text = os.fspath(place)
    if "://" not in text:
        return Path(text)
    protocol, _, rest = text.partition("://")
    if protocol == "file":
        return Path(rest)
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped, unused-ignore]

        # Without a cache of listings: other ranks write beside this one.
        store, key = url_to_fs(text, use_listings_cache=False)
    except ImportError as error:
        raise CheckpointError(f"{text}: {error}; install the package of fsspec for {protocol}://") from error
    except ValueError as error:
        raise CheckpointError(f"{text}: {error}; give a directory or the URL of an object store") from error
    return ObjectPath(key.rstrip("/"), store)


def names_in(location: Location) -> set[str]:
    """Names in a directory or below a prefix; none if it does not exist."""
    if isinstance(location, ObjectPath):
        return set(location.sizes())
    try:
        return {one.name for one in os.scandir(location)}
    except FileNotFoundError:
        return set()


def sizes_of(location: Location, names: Iterable[str]) -> Iterator[tuple[str, int | None]]:
    """Names and bytes of files; None for one that does not exist. Links are not followed."""
    there = location.sizes() if isinstance(location, ObjectPath) else {}
    for name in names:
        if isinstance(location, ObjectPath):
            yield name, there.get(name)
            continue
        try:
            yield name, (location / name).lstat().st_size
        except FileNotFoundError:
            yield name, None


def open_object(path: ObjectPath) -> BinaryIO:
    """An object to read. Raises FileNotFoundError, and any OSError of the store."""
    opened: BinaryIO = path.store.open(path.key, "rb", block_size=_READ_AHEAD_BYTES, cache_type="readahead")
    return opened


@contextlib.contextmanager
def writing_object(path: ObjectPath) -> Iterator[Callable[[bytes | memoryview], int]]:
    """Yields a function that writes bytes of a new object. Raises OSError."""
    try:
        file = path.store.open(path.key, "wb")
    except FileNotFoundError:  # a store that has directories, such as fsspec's of the local disk
        path.store.makedirs(path.parent.key, exist_ok=True)
        file = path.store.open(path.key, "wb")
    with file:
        yield file.write


def remove_tree(location: Location) -> None:
    """Removes a directory, or all objects below a prefix, as far as possible; nothing is raised."""
    if isinstance(location, Path):
        shutil.rmtree(location, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        location.store.rm(location.key, recursive=True)
