"""Starts the server that rank processes are forked from, and leaves no process behind."""

import pytest

from tests.support.pool import close_pools, start_server


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        start_server()


def pytest_unconfigure() -> None:
    close_pools()
