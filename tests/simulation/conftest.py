"""The simulated device stays in a process once it is there, so tests use it in a process of its own."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.simulation.device import COMPILER


@pytest.fixture(scope="session")
def on_device() -> Iterator[Callable[..., Any]]:
    """Calls a function, which can be pickled, in the process that has the device."""
    if COMPILER is None:
        pytest.skip("the simulated device is compiled from C++, and there is no g++ or clang++")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield lambda function, *args: process.submit(function, *args).result()
