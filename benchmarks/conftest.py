"""Writes into saved results what pytest-benchmark does not know of by itself."""

import torch


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["torch"] = torch.__version__
