"""How bad inputs are made, how many are tried (`SHARDKIT_FUZZ` multiplies it), and how much memory they may take."""

import contextlib
import copy
import os
import random
import resource
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

FACTOR = float(os.environ.get("SHARDKIT_FUZZ", "1"))


def fuzzed(run: Callable[[random.Random], None]) -> Callable[[], None]:
    """`run` for each of many generators."""
    chosen = settings(max_examples=int(150 * FACTOR), database=None, derandomize=FACTOR == 1)
    return chosen(given(seed=st.integers(0, 2**63))(lambda seed: run(random.Random(seed))))


@contextlib.contextmanager
def takes_at_most(mib: int) -> Iterator[None]:
    """The most memory that this process ever had grows by so many MiB at most inside."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    rise = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert rise < mib << 10, f"took {rise >> 10} MiB for a few kilobytes"


class Reduced:
    """Pickled as one call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        function, *args = self.call
        return function, tuple(args)


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
    *([], {}, [[]], [-1, 4]),
]


def with_values(value: Any, generator: random.Random) -> Any:
    """JSON in which one value, wherever it stands, is replaced by another."""
    places = _places(value)
    if not places:
        return _wrong(generator)
    *parents, last = generator.choice(places)
    changed = place = copy.deepcopy(value)
    for key in parents:
        place = place[key]
    place[last] = _wrong(generator)
    return changed


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in below for place in ((*path, key), *_places(inner, (*path, key)))]


def _wrong(generator: random.Random) -> Any:
    """A value of `_WRONG`, a small number, or a list of those, as shapes are."""
    numbers = [generator.randint(0, 5) for _ in range(generator.randint(1, 3))]
    return generator.choice([generator.choice(_WRONG), numbers[0], numbers])
