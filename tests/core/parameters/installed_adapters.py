"""Which adapters for DTensor parameters count as installed: those whose metadata lies in one directory, or none."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from shardkit.core.parameters import adapters


@contextlib.contextmanager
def installed_adapters(directory: Path | None) -> Iterator[None]:
    """Within this context the adapter is the one whose distribution lies in `directory`, if any does; None: no one.

    Only the look-up itself runs with another path: torch imports modules of its own at any time.
    """
    before = list(sys.path)
    adapters._dtensor_adapter.cache_clear()
    sys.path[:] = [] if directory is None else [str(directory)]
    try:
        adapters._dtensor_adapter()
    finally:
        sys.path[:] = before
    try:
        yield
    finally:
        adapters._dtensor_adapter.cache_clear()


def install_adapter(directory: Path, name: str, entry_point: str) -> None:
    """The metadata of a distribution that provides an adapter."""
    metadata = directory / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[shardkit.dtensor_adapters]\n{name} = {entry_point}\n")
