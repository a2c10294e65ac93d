"""torchft's manager in the all-reduce hook: two replicas of two shards."""

import pytest

from tests.trainers.launch import assert_same, results

pytest.importorskip("torchft")


@pytest.mark.slow
def test_same_as_stock():
    assert_same("torchft", "torchft", ranks=4)
    seen = results("torchft", "shardkit", 4)["torchft"]
    assert seen["committed"] == [True, True, True]
    assert seen["replicas agree"] == [True]
