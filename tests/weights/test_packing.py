"""Values over any two layouts, without processes: what is packed and unpacked by the plan is equal to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardkit.weights.boxes import Held, Wanted
from shardkit.weights.packing import Values, describe, holding, pack, unpack
from shardkit.weights.plan import Provided, buckets, plan
from tests.weights.layouts import boxes, layouts, slices


@settings(max_examples=50)
@given(layouts(), layouts(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), st.integers(8, 200))
def test_values_are_equal_over_any_two_layouts(there, here, dtype, limit):
    shape, placements, mesh = there
    full = {name: torch.randint(-1000, 1000, shape).to(torch.float32) for name in ("v", "w")}
    full["n"] = torch.randint(-(2**40), 2**40, shape)
    dtypes = {"v": dtype if dtype != torch.int64 else torch.float32, "w": torch.float16, "n": torch.int64}
    senders, sources = {}, []
    for rank, mine in enumerate(boxes(shape, placements, mesh)):
        senders[rank] = [Held(name, dtypes[name], shape, mine) for name in full]
        sources.append({name: [Values(box, full[name][slices(box)].clone()) for box in mine] for name in full})
    _, other, ranks = here
    other = [one for one in other if getattr(one, "dim", 0) < len(shape)] or [other[0]]
    if getattr(other[0], "dim", 0) >= len(shape):
        return
    for mine in boxes(shape, other, ranks[: len(other)]):
        wants = [Wanted(name, full[name].dtype, box) for name in full for box in mine]
        views = [Values(one.box, torch.zeros_like(full[one.name][slices(one.box)])) for one in wants]
        for rank, pieces in plan(Provided(senders), wants, bucket=limit).items():
            for _, nbytes, run in buckets(pieces, limit):
                bucket = torch.zeros(nbytes, dtype=torch.uint8)
                pack(run, [holding(one, sources[rank]) for one in run], bucket)
                unpack(run, bucket, views)
        for want, (box, view, _) in zip(wants, views, strict=True):
            assert torch.equal(view, full[want.name][slices(box)].to(dtypes[want.name]).to(view.dtype))


def test_a_model_is_described_in_the_dtype_that_is_sent():
    model = nn.BatchNorm1d(2)
    held, source = describe(model, lambda name: None if name == "running_var" else [name, f"{name}.2"], torch.bfloat16)
    assert {one.name: one.dtype for one in held if one.name.endswith(".2")} == {
        "weight.2": torch.bfloat16,
        "bias.2": torch.bfloat16,
        "running_mean.2": torch.bfloat16,
        "num_batches_tracked.2": torch.int64,
    }
    assert source["weight"][0].tensor.data_ptr() == model.weight.data_ptr()


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValueError, match="'weight' and 'bias' are both named 'w'"):
        describe(nn.Linear(2, 2), lambda name: "w", None)


@pytest.mark.parametrize("value", [torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), "text"])
def test_a_value_that_is_not_a_dense_tensor_is_refused(value):
    with pytest.raises(TypeError, match="'w' is not a dense tensor with values"):
        describe({"w": value}, str, None)
