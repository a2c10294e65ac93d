"""On the path of the scripts of pages: a rank of stock torch waits at its exit for the threads of gloo.

Otherwise 3 of 45 runs of docs/tutorials/from-fsdp1.md aborted after all their work. Ranks of shardkit do so by
themselves: `shardkit.core.runtime.gloo_threads` gives the reason, and has the function that waits here, too.
"""

import atexit
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def _wait() -> None:
    if "torch.distributed" in sys.modules and "shardkit.core" not in sys.modules:
        core = find_spec("shardkit.core")  # imports nothing of it
        assert core is not None and core.origin is not None
        runpy.run_path(str(Path(core.origin).parent / "runtime" / "gloo_threads.py"))["wait_for_threads"]()


atexit.register(_wait)
