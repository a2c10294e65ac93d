"""On the path of the scripts of pages: a rank of stock torch waits at its exit for the threads of gloo.

Otherwise 3 of 45 runs of docs/tutorials/from-fsdp1.md aborted after all their work. shardkit's ranks wait themselves, and
`shardkit.core.runtime.gloo_threads` says why, so they are left as they are.
"""

import atexit
import sys
import time


def _wait() -> None:
    if "torch.distributed" in sys.modules and "shardkit.core" not in sys.modules:
        time.sleep(0.5)  # releases Python's lock, so that a waiting thread gets it


atexit.register(_wait)
