"""What still holds when a log is cut: the entries that a new log begins with, so that its memory starts right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shardkit.core.events import StorageAllocated, StorageFreed, StorageKind
from shardkit.tools.profiling.log import (
    ActivationDropped,
    ActivationSaved,
    Entry,
    GradientAccumulated,
    GradientsKept,
    HeldBytes,
)

__all__ = ["carried"]


def carried(entries: Iterable[Entry]) -> list[Entry]:
    """Entries that bring about the memory at the end of `entries`."""
    storage: Counter[tuple[str, StorageKind]] = Counter()
    saved: dict[int, ActivationSaved] = {}
    gradients: dict[str, GradientAccumulated] = {}
    held: dict[str, HeldBytes] = {}
    for entry in entries:
        if isinstance(entry, StorageAllocated):
            storage[entry.fqn, entry.kind] += entry.bytes
        elif isinstance(entry, StorageFreed):
            storage[entry.fqn, entry.kind] -= entry.bytes
        elif isinstance(entry, ActivationSaved):
            saved[entry.key] = entry
        elif isinstance(entry, ActivationDropped):
            saved.pop(entry.key, None)
        elif isinstance(entry, GradientAccumulated):
            gradients[entry.fqn] = entry
        elif isinstance(entry, GradientsKept):
            gradients = {fqn: gradients[fqn] for fqn in entry.fqns if fqn in gradients}
        elif isinstance(entry, HeldBytes):
            held[entry.category] = entry
    allocated = [StorageAllocated(fqn, count, kind) for (fqn, kind), count in storage.items() if count > 0]
    return [*held.values(), *allocated, *saved.values(), *gradients.values()]
