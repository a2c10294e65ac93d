"""Starts the server that rank processes are forked from, and leaves no process behind. Marks cases for the night."""

import pytest

from tests.support.pool import close_pools, start_server


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        start_server()


def pytest_unconfigure() -> None:
    close_pools()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow what `daily` leaves to the night, before pytest reads `-m`."""
    for item in items:
        for mark in item.iter_markers("daily"):
            if any(item.callspec.params[name] not in values for name, values in mark.kwargs.items()):
                item.add_marker("slow")
