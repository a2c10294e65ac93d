"""torchtitan's Llama."""

import pytest

from tests.trainers.launch import assert_same

pytest.importorskip("torchtitan.models.llama3")


def test_same_as_stock():
    assert_same("torchtitan", "one axis")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one axis", "HSDP"])
def test_same_as_stock_on_four_ranks(case: str):
    assert_same("torchtitan", case, ranks=4)
