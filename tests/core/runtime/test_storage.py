"""Which tensors lie one after the other in the same memory."""

import torch

from shardkit.core.runtime.storage import runs


def test_runs() -> None:
    buffer, halves, other = torch.arange(24.0), torch.arange(8.0).half(), torch.arange(6.0)
    tensors = [
        buffer[0:6].view(2, 3),
        halves[0:4],
        buffer[6:6],
        other.view(2, 3).T,
        buffer[6:10],
        other,
        halves[4:8],
        buffer[12:16],  # behind a gap
        buffer[10:12],  # before what has come already
    ]
    found = runs(tensors, [0, *range(2, 9), 1])
    assert [places for _, places in found] == [[0, 2, 4, 8], [3], [5], [6], [7], [1]]
    for flat, places in found:
        assert flat.tolist() == [element for place in places for element in tensors[place].flatten().tolist()]
        assert flat.data_ptr() == tensors[places[0]].data_ptr() or places == [3]
    assert [places for _, places in runs(tensors, range(9))][1] == [1, 6]
