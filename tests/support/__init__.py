"""The parts of multi-rank tests: a pool of rank processes and a parity harness.

A test under :func:`on_ranks` runs on every rank of a pool of processes that already share a gloo process group;
``CONTRIBUTING.md`` has one. ``on_ranks(1, 2, 4)`` makes a case of each number of ranks, and ``on_ranks()`` takes it
from a ``parametrize``. A test that looks at what its ranks return hands a *body*, a plain module-level function, to
:func:`run_ranks`, which gives one result per rank, in rank order.

* ``body`` and ``args`` travel by pickle, so ``body`` is found by module and name; results must pickle too (plain
  tensors do, DTensors and process groups do not). A ``functools.partial`` of a module-level function works.
* Random seeds (torch, numpy, random) are ``seed`` on every rank, or ``seed + rank`` with ``seed_per_rank=True``.
* Any failing rank raises :class:`RankFailure`, with the errors of all, first failure first. ``pytest.raises`` inside a
  body is cheaper than around ``run_ranks``, because a failure on a rank throws the pool of that world size away.
* ``isolated=True`` is for bodies that destroy the process group, spoil process-wide state or leave a collective
  unmatched on purpose.
* Warnings and printed output of the ranks reappear in the pytest process; ``pytest.skip`` on any rank skips the test.
* Between bodies every rank is put back: environment, default dtype and device, grad mode, RNG; then gc and a barrier.

Process groups live as long as their pool. Make meshes with :func:`rank_mesh`, which is cached on each rank;
``networked_mesh`` is the same with ranks that do not share memory.
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
