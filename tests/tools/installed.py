"""Lets processes of their own find the entry points of shardkit-tools, whether it is installed or not."""

import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(directory: Path, **variables: str) -> dict[str, str]:
    """An environment whose Python has this one's import path, and finds the package's metadata in `directory`."""
    project = tomllib.loads((ROOT / "packages" / "tools" / "pyproject.toml").read_text())["project"]
    metadata = directory / "shardkit_tools-0.dist-info"
    if not metadata.exists():
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shardkit-tools\nVersion: 0\n")
        groups = [
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
            for group, entries in project["entry-points"].items()
        ]
        (metadata / "entry_points.txt").write_text("\n".join(groups))
    path = os.pathsep.join([str(directory), *(entry for entry in sys.path if entry)])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | variables
