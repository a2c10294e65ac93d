"""Adds the version of torch to saved results, and refuses a comparison if nothing has been saved."""

import pytest
import torch


def pytest_sessionstart(session):
    benchmarks = session.config._benchmarksession
    if benchmarks.compare and not benchmarks.storage.query():
        raise pytest.UsageError(
            f"no benchmarks have been saved on this machine ({benchmarks.storage} is empty); run `hatch run "
            "bench-save` first, at the commit to compare with"
        )


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["torch"] = torch.__version__
