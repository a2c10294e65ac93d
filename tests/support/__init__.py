"""The parts of multi-rank tests: a pool of rank processes and a parity harness.

A test under :func:`on_ranks` runs on every rank of a pool of processes that already share a gloo process group::

    from tests.support import on_ranks

    @pytest.mark.parametrize("numel", [0, 3])
    @on_ranks(2)
    def test_sum(rank: int, world_size: int, numel: int) -> None:
        tensor = torch.full((numel,), float(rank))
        torch.distributed.all_reduce(tensor)
        assert tensor.sum() == numel

``on_ranks(1, 2, 4)`` makes a case of each number of ranks, and ``on_ranks()`` takes it from a ``parametrize``.

A test that looks at what its ranks return hands a *body*, a plain module-level function, to :func:`run_ranks`::

    assert run_ranks(2, body, 3) == [...]          # one result per rank, in rank order

``run_ranks(world_size, body, *args, timeout=60.0, seed=0, seed_per_rank=False, isolated=False)``

* ``body`` and ``args`` travel by pickle, so ``body`` is found by module and name; results must pickle too (plain
  tensors do, DTensors and process groups do not). A ``functools.partial`` of a module-level function works.
* Random seeds (torch, numpy, random) are ``seed`` on every rank, or ``seed + rank`` with ``seed_per_rank=True``.
* Any failing rank raises :class:`RankFailure`, whose text holds the rank, type, message and remote traceback of each
  one, first failure first; ``failure.errors`` has them as data. ``pytest.raises`` inside a body is cheaper than around
  ``run_ranks``, because a failure on a rank throws the pool of that world size away.
* A call that outlives ``timeout`` seconds raises :class:`RankTimeout`, with the stacks of all ranks.
* ``isolated=True`` throws the pool away after the call as well: for bodies that destroy the process group, spoil
  process-wide state or leave a collective unmatched on purpose.
* Warnings and printed output of the ranks reappear in the pytest process.
* ``pytest.skip`` called by a body on any rank skips the test.
* Between bodies every rank is put back: environment, default dtype and device, grad mode, RNG; then gc and a barrier.

Process groups live as long as their pool. Make meshes with :func:`rank_mesh`, which is cached on each rank::

    mesh = rank_mesh((2, 2), ("replicate", "shard"))

``networked_mesh`` is the same with ranks that do not share memory.

``tests/support/parity.py`` has the differential harness; its head says how to use it.
"""

from tests.support.failures import RankError, RankFailure, RankTimeout
from tests.support.meshes import networked_mesh, rank_mesh
from tests.support.pool import close_pools, on_ranks, run_ranks

__all__ = [
    "RankError",
    "RankFailure",
    "RankTimeout",
    "close_pools",
    "networked_mesh",
    "on_ranks",
    "rank_mesh",
    "run_ranks",
]
