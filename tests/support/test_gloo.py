"""Works of one group of gloo that end at the same time."""

import torch
import torch.distributed as dist

from tests.support import on_ranks


@on_ranks(1, isolated=True)
def test_works_in_flight_do_not_corrupt_memory(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    numbers, gathered = torch.ones(4), torch.empty(4)
    for _ in range(600):
        works = []
        for _ in range(50):
            works.append(dist.all_reduce(numbers, async_op=True))
            works.append(group.allgather_into_tensor_coalesced([gathered], [torch.ones(4)]))
        for work in works:
            work.wait()
    assert numbers.tolist() == gathered.tolist() == [1.0] * 4
