"""How bad inputs are made, how many are tried (`SHARDKIT_FUZZ` multiplies it), and how much memory they may take."""

import contextlib
import os
import random
import resource
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings

FACTOR = float(os.environ.get("SHARDKIT_FUZZ", "1"))
fuzzed = settings(
    max_examples=int(150 * FACTOR), database=None, derandomize=FACTOR == 1, suppress_health_check=list(HealthCheck)
)


@contextlib.contextmanager
def takes_at_most(mib: int) -> Iterator[None]:
    """The most memory that this process ever had grows by so many MiB at most inside."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    rise = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert rise < mib << 10, f"took {rise >> 10} MiB for a few kilobytes"


def with_bytes(data: bytes, generator: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(found) + 1)
        cut = generator.choice((0, 1, 1, 4, 40))
        new = generator.randbytes(generator.choice((cut, cut, generator.randint(0, 12))))
        found[at : at + cut] = new
    return bytes(found)


_WRONG: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**62, 2**63, 2**70, 10**18, 1.5, float("nan"), float("inf")),
    *("", "x", "\0", "\x1b[2J", "..", "../x", "/etc/passwd", ".metadata", "float64", "qint8", "bits8"),
    *([], {}, [[]], [-1, 4], [0, 5, 3]),
]


def with_values(value: Any, generator: random.Random) -> Any:
    """JSON in which one value is replaced by another."""
    if isinstance(value, dict) and value and generator.random() < 0.85:
        key = generator.choice(list(value))
        return {**value, key: with_values(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.85:
        at = generator.randrange(len(value))
        return [*value[:at], with_values(value[at], generator), *value[at + 1 :]]
    return generator.choice(_WRONG)
