"""The cast of a test: senders, receivers, threads and other processes."""

from collections.abc import Iterator

import pytest

from tests.weights.processes import Cast


@pytest.fixture
def cast() -> Iterator[Cast]:
    with Cast() as one:
        yield one
