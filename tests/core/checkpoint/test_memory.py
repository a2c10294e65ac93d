"""`stored.py`: the bytes of a tensor, and of nothing else."""

import pytest
import torch

from shardkit.core.checkpoint.stored import bytes_of, memory_of


def test_bytes_are_those_of_the_tensor():
    rows = torch.arange(12, dtype=torch.int16).view(3, 4)[1:]
    assert bytes(memory_of(rows)) == b"".join(value.to_bytes(2, "little") for value in range(4, 12))
    few = torch.arange(4, dtype=torch.int16)
    bytes_of(few[1:2].as_strided((1, 1), (3, 7))).fill_(0)
    assert few.tolist() == [0, 0, 2, 3]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3, 4).t(), torch.zeros(6)[::2], torch.zeros(1).expand(3)],
    ids=["transposed", "every other", "expanded"],
)
def test_one_with_other_memory_in_between_is_refused(tensor: torch.Tensor):
    with pytest.raises(AssertionError, match="strides"):
        bytes_of(tensor)
