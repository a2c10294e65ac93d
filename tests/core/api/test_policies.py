"""Stock's policy objects mean the same as ours, field by field."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock

from shardkit.core import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from shardkit.core.policies import as_mesh_dims, as_mixed_precision, as_offload, offload_of_each


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


HOST, PAGED, SOME = CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False), CPUOffloadPolicy(budget=30)
NBYTES = {"norm.weight": 8, "experts.up": 40, "experts.down": 20, "head.weight": 24}


@pytest.mark.parametrize(
    ("policy", "offloaded"),
    [
        (OffloadPolicy(), {}),
        (HOST, dict.fromkeys(NBYTES, HOST)),
        (stock.CPUOffloadPolicy(), dict.fromkeys(NBYTES, HOST)),
        ({"experts.*": HOST}, {"experts.up": HOST, "experts.down": HOST}),
        (
            {"experts.up": OffloadPolicy(), "experts.*": HOST, "head.weight": PAGED},
            {"experts.down": HOST, "head.weight": PAGED},
        ),
        (SOME, {"experts.up": SOME, "head.weight": SOME}),
        (CPUOffloadPolicy(budget=0), dict.fromkeys(NBYTES, CPUOffloadPolicy(budget=0))),
        ({"e*": CPUOffloadPolicy(budget=20)}, {"experts.up": CPUOffloadPolicy(budget=20)}),
        ({}, {}),
    ],
)
def test_offload_by_name_and_budget(policy: Any, offloaded: dict[str, CPUOffloadPolicy]) -> None:
    """The first pattern decides; of those with a budget the largest go until the others fit."""
    chosen = offload_of_each(policy, NBYTES)
    assert [*chosen] == [*NBYTES]
    assert {fqn: one for fqn, one in chosen.items() if type(one) is not OffloadPolicy} == offloaded


def test_offload_by_a_name_that_is_none() -> None:
    with pytest.raises(
        ValueError, match=r"names 'expert.\*', which matches none of this call's parameters: norm.weight"
    ):
        offload_of_each({"expert.*": HOST}, NBYTES)
    with pytest.raises(TypeError, match="got 'cpu'; pass"):
        offload_of_each({"experts.*": "cpu"}, NBYTES)
    with pytest.raises(ValueError, match="budget is -1; pass a number of bytes"):
        CPUOffloadPolicy(budget=-1)


def test_mesh_dims_of_stock() -> None:
    if not hasattr(stock, "DataParallelMeshDims"):
        pytest.skip("this torch has no DataParallelMeshDims")
    for shard, replicate in (("a", None), (None, "b"), ("a", "b"), (("a", "b"), "c")):
        seen = as_mesh_dims(stock.DataParallelMeshDims(shard, replicate))
        assert seen == DataParallelMeshDims(shard, replicate)
