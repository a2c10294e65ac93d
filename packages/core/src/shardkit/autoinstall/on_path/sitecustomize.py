"""Python imports this at its start if this directory is on PYTHONPATH: arms shardkit, then runs the next one.

It finds `shardkit.autoinstall` beside itself, so that an interpreter without shardkit says so when it imports FSDP.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _arm() -> None:
    name = "shardkit.autoinstall"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _HERE.parent / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    if sys.modules[name].wanted():
        sys.modules[name].arm()


def _run_next() -> None:
    """Runs the sitecustomize that this one hides: the environment's, or another tool's on PYTHONPATH."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])


_arm()
_run_next()
