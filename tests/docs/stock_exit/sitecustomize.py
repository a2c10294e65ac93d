"""On the path of the scripts of pages: a rank of stock torch waits at its exit for the threads of gloo.

Otherwise 3 of 45 runs of docs/tutorials/from-fsdp1.md aborted after all their work. Ranks of shardkit wait without it;
`shardkit.core.runtime.gloo_threads` says why.
"""

import atexit
import sys
import time


def _wait() -> None:
    if "torch.distributed" in sys.modules and "shardkit.core" not in sys.modules:
        time.sleep(0.5)  # releases Python's lock, so that a waiting thread gets it


atexit.register(_wait)
