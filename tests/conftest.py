"""Starts the server that rank processes are forked from, and leaves no process behind. Marks cases for the night."""

import pytest

from tests.support.pool import close_pools, start_server


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly and not _hands_tests_out(config):
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


def _hands_tests_out(config: pytest.Config) -> bool:
    """Whether this process runs no test itself, because workers of pytest-xdist do."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")
