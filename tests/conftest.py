"""Starts the server that rank processes are forked from, and leaves no process behind. Marks cases for the night.

A test that only fails because an older torch lacks something is skipped (tests/support/lacking.py).
"""

import importlib.util
from collections.abc import Generator

import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.lacking import lacking
from tests.support.pool import close_pools, start_server

if importlib.util.find_spec("hypothesis") is not None:  # the trainers' environment has none
    from hypothesis import HealthCheck, settings

    # A busy machine is slow.
    settings.register_profile("without a deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("without a deadline")


def pytest_configure(config: pytest.Config) -> None:
    # Where pytest-xdist distributes the tests, each of its workers has a server and pools of its own.
    distributes = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not config.option.collectonly and not distributes:
        start_server()


def pytest_unconfigure() -> None:
    close_pools()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `daily` leaves to the night as slow, before pytest reads `-m`.

    Raises:
        UsageError: for values that no case has, so that no case would run by day.
    """
    for item in items:
        for mark in item.iter_markers("daily"):
            for name, values in mark.kwargs.items():
                if not any(value in values for value in _cases(item, name)):
                    raise pytest.UsageError(f"{item.nodeid}: daily({name}={values}), and no case has such a value")
                if item.callspec.params[name] not in values:
                    item.add_marker("slow")


def _cases(item: pytest.Item, name: str) -> list[object]:
    """The values of one parameter of a test over all of its cases."""
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        names = [one.strip() for one in names]
        if name in names:
            cases = [ParameterSet.extract_from(case, force_tuple=len(names) == 1) for case in mark.args[1]]
            return [case.values[names.index(name)] for case in cases]
    return [item.callspec.params[name]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    try:
        yield
    except Exception as error:
        if reason := lacking(error):
            pytest.skip(reason)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.failed and (reason := lacking(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, reason)
    return report
