"""Lightning's Trainer and Fabric."""

import pytest

from tests.trainers.launch import Engine, assert_resumes_across, assert_same

pytest.importorskip("lightning")


@pytest.mark.parametrize("case", ["Trainer", "resumed", "Fabric"])
def test_same_as_stock(case: str):
    assert_same("lightning", case)


@pytest.mark.parametrize("engine", ["shardkit", pytest.param("stock", marks=pytest.mark.slow)])
def test_checkpoints_load_across(engine: Engine):
    assert_resumes_across("lightning", engine)
