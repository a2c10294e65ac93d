"""How many bad inputs of each kind are tried (`SHARDKIT_FUZZ` multiplies it), and how much memory they may take."""

import contextlib
import os
import resource
from collections.abc import Iterator

from hypothesis import HealthCheck, settings

_FACTOR = float(os.environ.get("SHARDKIT_FUZZ", "1"))
fuzzed = settings(
    max_examples=int(150 * _FACTOR), database=None, derandomize=_FACTOR == 1, suppress_health_check=list(HealthCheck)
)


@contextlib.contextmanager
def takes_at_most(mib: int) -> Iterator[None]:
    """The most memory that this process ever had grows by so many MiB at most inside."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    rise = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert rise < mib << 10, f"took {rise >> 10} MiB for a few kilobytes"
