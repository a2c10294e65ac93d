"""Keys of a checkpoint that its user does not want to have converted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of

__all__ = ["LeftOut"]


class LeftOut:
    """Names of values, or of dicts with all that lies in them: "rng", "optim.state.embed.weight"."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = tuple(keys)
        self._found: set[str] = set()

    def has(self, path: LeafPath) -> bool:
        """Whether what lies at `path` is left out."""
        name = name_of(path)
        found = [key for key in self._keys if name == key or name.startswith(f"{key}.")]
        self._found.update(found)
        return bool(found)

    def rest(self, leaves: Mapping[LeafPath, Any]) -> Iterator[tuple[LeafPath, Any]]:
        """What is not left out."""
        return ((path, value) for path, value in leaves.items() if not self.has(path))

    def check(self, source: object) -> None:
        """Raises `CheckpointError` for keys that were not met, once all of a checkpoint was."""
        if unknown := [key for key in self._keys if key not in self._found]:
            raise CheckpointError(f"{source} has no {', '.join(map(repr, unknown))}, which is to be left out")
