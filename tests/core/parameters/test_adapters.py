"""How core finds an adapter for parameters that are DTensors already; a real one has tests in tests/tp_adapter."""

from pathlib import Path

import pytest
from torch import nn

from shardkit.core import fully_shard
from shardkit.core.parameters import adapters
from tests.core.parameters.installed_adapters import install_adapter, installed_adapters
from tests.support import on_ranks

adapter = object()


def test_the_one_that_is_installed_is_found(tmp_path: Path) -> None:
    install_adapter(tmp_path, "one", "tests.core.parameters.test_adapters:adapter")
    with installed_adapters(tmp_path):
        assert adapters._dtensor_adapter() is adapter


@on_ranks(1)
def test_without_an_adapter_plain_parameters_work(rank: int, world_size: int) -> None:
    with installed_adapters(None):
        fully_shard(nn.Linear(2, 2))


def test_two_adapters_are_refused(tmp_path: Path) -> None:
    install_adapter(tmp_path, "one", "tests.core.parameters.test_adapters:adapter")
    install_adapter(tmp_path, "two", "tests.core.parameters.test_adapters:adapter")
    refused = pytest.raises(RuntimeError, match=r"several adapters.*one = .*two = .*all but one")
    with refused, installed_adapters(tmp_path):
        raise AssertionError("not reached")
