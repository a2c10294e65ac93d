"""Stock's policy objects mean the same as ours, field by field."""

import itertools

import pytest
import torch
import torch.distributed.fsdp as stock

from shardkit.core import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from shardkit.core.policies import as_mesh_dims, as_mixed_precision, as_offload


def test_mixed_precision_of_stock() -> None:
    dtypes = (None, torch.bfloat16, torch.float64)
    for param, reduce, output, cast in itertools.product(dtypes, dtypes, dtypes, (True, False)):
        ours = MixedPrecisionPolicy(param, reduce, output, cast)
        assert as_mixed_precision(stock.MixedPrecisionPolicy(param, reduce, output, cast)) == ours
        assert as_mixed_precision(ours) is ours
    assert as_mixed_precision(stock.MixedPrecisionPolicy()) == MixedPrecisionPolicy()


def test_offload_of_stock() -> None:
    for pin_memory in (True, False):
        seen = as_offload(stock.CPUOffloadPolicy(pin_memory=pin_memory))
        assert isinstance(seen, CPUOffloadPolicy)
        assert seen.pin_memory is pin_memory
    assert type(as_offload(stock.OffloadPolicy())) is OffloadPolicy
    assert CPUOffloadPolicy().pin_memory is stock.CPUOffloadPolicy().pin_memory


def test_mesh_dims_of_stock() -> None:
    if not hasattr(stock, "DataParallelMeshDims"):
        pytest.skip("this torch has no DataParallelMeshDims")
    for shard, replicate in (("a", None), (None, "b"), ("a", "b"), (("a", "b"), "c")):
        seen = as_mesh_dims(stock.DataParallelMeshDims(shard, replicate))
        assert seen == DataParallelMeshDims(shard, replicate)
