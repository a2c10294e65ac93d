"""Which tensors lie one after the other in the same memory."""

import torch

from shardkit.core.runtime.storage import part_of, runs


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


def test_parts_of_a_buffer_are_one_run() -> None:
    buffer = torch.arange(10.0)
    parts = [part_of(buffer, view) for view in buffer.split([3, 0, 5, 2])]
    assert [part.untyped_storage().nbytes() for part in parts] == [12, 0, 20, 8]
    ((flat, places),) = runs([*parts, torch.ones(1)], range(4))
    assert places == [0, 1, 2, 3]
    assert flat.untyped_storage().data_ptr() == buffer.data_ptr()
    parts[2].mul_(2)
    assert flat.tolist() == buffer.tolist() == [0, 1, 2, 6, 8, 10, 12, 14, 8, 9]
    assert parts[0]._version == 0
    (_, places), (other, _) = runs([parts[2], parts[3].view(torch.int32)], range(2))
    assert places == [0]
    assert other.dtype == torch.int32
